"""Every operator of a full-size block in bfloat16, with an adapter and without: right against float64, fast
against its definition. Documents of odd lengths.
"""

from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.gpu.finding import Finding
from benchmarks.gpu.model import GLM_4_9B_0414, TINY, random_decoder
from benchmarks.gpu.ours import LORA
from glm_accelerate.bench.judge import bandwidth, judged
from glm_accelerate.models.adapt import add_lora

LENGTHS = (1_999, 731, 1_025, 64, 17, 260)  # 4,096 tokens
TINY_LENGTHS = (33, 7, 24)
TARGETS, ROUNDS = 1_500, 5


def operators(device: torch.device, tiny: bool) -> Iterator[Finding]:
    """A line for each; `ok` by the house rule: at most twice the definition's error and one rounding more."""
    model = random_decoder((TINY if tiny else GLM_4_9B_0414) | {"num_hidden_layers": 1}, device)
    add_lora(model, LORA)
    model.train()
    copied = bandwidth(device)
    lengths, targets, rounds = (TINY_LENGTHS, 20, 1) if tiny else (LENGTHS, TARGETS, ROUNDS)
    for one in judged(model, lengths, targets, rounds):
        allowed = 2 * one.reference_error + torch.finfo(torch.bfloat16).eps
        share = one.bytes / one.seconds / copied
        figures = {**asdict(one), "share_of_bandwidth": share, "copied_bytes_per_second": copied}
        yield Finding(f"operator {one.name}", one.error <= allowed, figures)
