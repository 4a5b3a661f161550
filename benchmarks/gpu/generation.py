"""Answers at full size, ours beside `generate` of transformers as the stock script calls it: the very same
weights, and a stop schedule that neither side knows beforehand. Before that, token for token, in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Glm4Config, Glm4ForCausalLM

from benchmarks.evaluation import generation_sides
from benchmarks.evaluation.generation_sides import Done, Job, first_difference
from benchmarks.gpu.finding import Finding
from benchmarks.gpu.memory import peak_bytes, start_peak
from benchmarks.gpu.model import GLM_4_9B_0414, TINY, random_decoder
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.write import state_for

AIM = 5.0  # times as fast
SPREAD = 0.8  # of the logarithm of lengths
DEFAULTS = ("model_type", "rope_theta", "partial_rotary_factor")  # the config's class has them
PARTS = ("prefill", "decode", "whole")


@dataclass(frozen=True)
class Asked:
    """Lengths in tokens: (median, at most). `batches` are theirs, `few` is compared in float32."""

    prompts: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    batches: tuple[int, ...]
    warm: int  # prompts that are answered before the clock starts
    few: int


FULL = Asked(64, (200, 1_000), (60, 256), (16, 4), warm=16, few=8)
LITTLE = Asked(8, (12, 40), (5, 12), (4, 2), warm=4, few=4)


def generation(device: torch.device, tiny: bool) -> Iterator[Finding]:
    """Both sides with and without cuDNN's attention: torch may prefer it, and it plans anew for every shape,
    so for every token of a growing answer. Elsewhere there is nothing to choose.
    """
    asked, config = (LITTLE, TINY) if tiny else (FULL, GLM_4_9B_0414)
    yield same_in_float32(asked, config | {"num_hidden_layers": 2 if tiny else 4}, device)
    torch.manual_seed(0)
    model = random_decoder(config, device)
    stock, job = stock_of(model), job_of(asked, config, device)
    if device.type != "cuda":
        yield from compared(model, stock, job, asked, "", tiny)
        return
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for cudnn in (False, True):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            how = f", cuDNN's attention {'allowed' if cudnn else 'off'}"
            yield from compared(model, stock, job, asked, how, tiny)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def compared(model: Decoder, stock: Any, job: Job, asked: Asked, how: str, tiny: bool) -> Iterator[Finding]:
    """Ours once, and theirs in each of their batches."""
    mine, figures = measured(model, stock, job, asked.warm)
    lengths = figures["lengths"] = lengths_of(job)
    yield Finding(f"generation ours{how}", answer_lengths(mine) == job.lengths, figures)
    for batch in asked.batches:
        other, figures = measured(model, stock, replace(job, side="theirs", batch=batch), asked.warm)
        ratios = {part: getattr(other, part) / getattr(mine, part) for part in PARTS}
        pairs = zip(mine.answers, other.answers, strict=True)
        figures |= {
            "lengths": lengths,
            "theirs / ours": ratios,
            "aim": AIM,
            "same answers": sum(a == b for a, b in pairs),
        }
        fast = tiny or ratios["whole"] >= AIM  # tiny sizes say nothing about speed
        yield Finding(
            f"generation against batches of {batch}{how}",
            answer_lengths(other) == job.lengths and fast,
            figures,
        )


def measured(model: Decoder, stock: Any, job: Job, warm: int) -> tuple[Done, dict[str, Any]]:
    """Some whole answers first: kernels are compiled and loaded for the shapes that they meet."""
    device = model.embed.device
    assert job.lengths is not None
    run(model, stock, replace(job, prompts=job.prompts[:warm], lengths=job.lengths[:warm]))
    start_peak(device)
    done = run(model, stock, job)
    return done, {
        **{f"{part}_seconds": getattr(done, part) for part in PARTS},
        "answer_tokens_per_second": done.tokens / done.whole,
        "peak_bytes": peak_bytes(device),
        "same lengths as asked": answer_lengths(done) == job.lengths,
    }


def run(model: Decoder, stock: Any, job: Job) -> Done:
    """One side as it runs elsewhere, with a model that is there already in place of one from files."""
    if job.side == "ours":
        with patch.object(generation_sides, "load_model", return_value=model):
            return generation_sides.ours(job)
    with patch.object(AutoModelForCausalLM, "from_pretrained", return_value=stock):
        return generation_sides.theirs(job)


def same_in_float32(asked: Asked, config: dict[str, Any], device: torch.device) -> Finding:
    """Few layers and prompts: each answer as long as allowed, then with the schedule."""
    torch.manual_seed(0)
    model = random_decoder(config, device, torch.float32)
    model.compute = None
    stock, job = stock_of(model), job_of(asked, config, device)
    assert job.lengths is not None
    few, new = job.prompts[: asked.few], asked.answer[0]
    base = replace(job, prompts=few, new=new, dtype="float32", warm=False)
    parted: list[int | None] = []
    for lengths in (None, [min(length, new) for length in job.lengths[: asked.few]]):
        mine = replace(base, lengths=lengths)
        theirs = replace(mine, side="theirs", batch=min(asked.batches))
        pairs = zip(run(model, stock, mine).answers, run(model, stock, theirs).answers, strict=True)
        parted += [first_difference(a, b) for a, b in pairs]
    same = sum(place is None for place in parted)
    figures = {"same": same, "of": len(parted), "layers": model.sizes.layers, "first differences": parted}
    return Finding("generation in float32", same == len(parted), figures)


def stock_of(model: Decoder) -> Any:
    """transformers' model. Its tensors are ours, not copies."""
    state, config = state_for(model, "hf")
    with torch.device("meta"):
        stock = Glm4ForCausalLM(Glm4Config(**{k: v for k, v in config.items() if k not in DEFAULTS}))
    stock.load_state_dict(state, assign=True)
    with model.embed.device:  # these are computed, not loaded
        stock.model.rotary_emb = type(stock.model.rotary_emb)(stock.config)
    assert not any(tensor.is_meta for tensor in (*stock.parameters(), *stock.buffers()))
    return stock.eval()


def job_of(asked: Asked, config: dict[str, Any], device: torch.device) -> Job:
    """Prompts of random words, and after how many tokens each answer stops."""
    draw = np.random.default_rng(0)

    def lengths(typical: int, most: int) -> list[int]:
        drawn = draw.lognormal(np.log(typical), SPREAD, asked.prompts)
        return np.clip(drawn, 1, most).astype(int).tolist()

    prompts = [draw.integers(3, config["vocab_size"], n).tolist() for n in lengths(*asked.prompt)]
    return Job(
        side="ours",
        model="in memory",
        prompts=prompts,
        stops=config["eos_token_id"],
        lengths=lengths(*asked.answer),
        batch=None,
        new=asked.answer[1],
        dtype="bfloat16",
        device=device.type,
        threads=torch.get_num_threads(),
    )


def answer_lengths(done: Done) -> list[int]:
    """How many tokens each answer has."""
    return [len(answer) for answer in done.answers]


def lengths_of(job: Job) -> dict[str, list[float]]:
    """Median, longest, and all together."""
    answers = job.lengths or []
    kinds = {"prompts": [len(prompt) for prompt in job.prompts], "answers": answers}
    return {kind: [float(np.median(each)), max(each), sum(each)] for kind, each in kinds.items()}
