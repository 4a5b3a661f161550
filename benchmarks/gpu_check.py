"""What a machine with a GPU is asked to show: parity with transformers, and a few training steps of
GLM-4-9B-0414 at full size with random weights. `benchmarks/gpu.sh` runs it from a bare checkout.

One JSON line a finding goes to OUT/gpu.jsonl at once, failures too, so a run that dies leaves what it had.
`--tiny` does the same at tiny size on any machine.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

from glm_accelerate.data.collate import collate
from glm_accelerate.data.pack import Arrangement, aligned
from glm_accelerate.data.types import Batch, Place, Sample, Step
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import family_of
from glm_accelerate.models.weights import load_model

LENGTHS = (5, 17, 64, 42)  # documents of the packed row
WARMUP, MEASURED = 2, 5  # training steps
GLM_4_9B_0414: dict[str, Any] = {
    "model_type": "glm4",
    "vocab_size": 151_552,
    "hidden_size": 4_096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "eos_token_id": [151_329, 151_336, 151_338],
    "pad_token_id": 151_329,
}
TINY: dict[str, Any] = GLM_4_9B_0414 | {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 16,
    "eos_token_id": [1, 2],
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Finding:
    """One line of the result. `ok` is None where there is nothing to pass."""

    part: str
    ok: bool | None
    figures: dict[str, Any]


@dataclass(frozen=True)
class Outputs:
    """What is compared between two models."""

    logits: Tensor
    gradient: Tensor


class Log:
    """Appends each finding to a file and to the screen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def add(self, finding: Finding) -> None:
        self.failed += finding.ok is False
        line = json.dumps(asdict(finding))
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def attempt(self, part: str, work: Callable[[], Iterator[Finding]]) -> None:
        """Whatever goes wrong in one part is written down, and the next part still runs."""
        try:
            for finding in work():
                self.add(finding)
        except Exception as error:  # noqa: BLE001 (a line in the result is all that a remote run leaves)
            where = traceback.format_exc().strip().splitlines()[-6:]
            self.add(Finding(part, False, {"error": f"{type(error).__name__}: {error}", "where": where}))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def machine(device: torch.device) -> Finding:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Finding("machine", None, {"device": name, "python": platform.python_version(), **versions})


def randomise(model: nn.Module) -> None:
    """Norms and biases too: at their starting values a mistake in them would not be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.ndim == 1))


def oracle(family: str) -> Any:
    """A small model of transformers with odd sizes and random weights, in float32 on the CPU."""
    common = {
        key: TINY[key] for key in TINY if key not in ("model_type", "rope_theta", "partial_rotary_factor")
    }
    torch.manual_seed(0)
    model = Glm4ForCausalLM(Glm4Config(**common)) if family == "glm4" else GlmForCausalLM(GlmConfig(**common))
    randomise(model)
    return model.eval()


def parity(device: torch.device) -> Iterator[Finding]:
    """Logits and gradients of a packed row against transformers, which gets one document at a time."""
    for family in ("glm4", "glm"):
        theirs = oracle(family)
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            theirs.to(device)
            documents = [torch.randint(3, TINY["vocab_size"], (length,)) for length in LENGTHS]
            exact = by_document(theirs.double(), documents)
            for dtype in (torch.float32, torch.bfloat16):
                ours = load_model(directory, dtype=dtype, device=device)
                yield compare(
                    family, dtype, packed(ours, documents), by_document(theirs.to(dtype), documents), exact
                )


def by_document(model: Any, documents: list[Tensor]) -> Outputs:
    """transformers' logits of every document alone, and the embedding's gradient of the summed loss."""
    model.zero_grad()
    device = next(model.parameters()).device
    total, logits = torch.zeros((), device=device), []
    for tokens in (document.to(device) for document in documents):
        logits.append(model(input_ids=tokens[None], use_cache=False).logits[0])
        wide = logits[-1] if logits[-1].dtype == torch.float64 else logits[-1].float()
        total = total + F.cross_entropy(wide[:-1], tokens[1:], reduction="sum")
    total.backward()
    return Outputs(torch.cat(logits).detach(), model.get_input_embeddings().weight.grad.detach().clone())


def packed(model: Decoder, documents: list[Tensor]) -> Outputs:
    """The same from ours: all documents in one row, through the collate and the loss that training uses."""
    from glm_accelerate.train.step import batch_loss

    model.requires_grad_(True)
    device = model.embed.device
    positions_T = torch.cat([torch.arange(len(tokens)) for tokens in documents]).to(device)
    logits = model(torch.cat(documents)[None].to(device), positions_T[None])[0]
    batch_loss(model, row_of_all([sample(tokens) for tokens in documents]), device).backward()
    assert model.embed.grad is not None
    return Outputs(logits.detach(), model.embed.grad.detach())


def sample(tokens: Tensor) -> Sample:
    learnt = np.ones(len(tokens), dtype=bool)
    return Sample(tokens.numpy().astype(np.int32), learnt, Place("random", 1))


def compare(family: str, dtype: torch.dtype, ours: Outputs, theirs: Outputs, exact: Outputs) -> Finding:
    """Ours may be twice as far from float64 as transformers in the same dtype is, and a rounding more."""
    figures: dict[str, float] = {}
    ok = True
    for name in ("logits", "gradient"):
        mine, other, true = (getattr(outputs, name).double() for outputs in (ours, theirs, exact))
        scale = true.abs().max()
        error = float((mine - true).abs().max() / scale)
        allowed = float(2 * (other - true).abs().max() / scale) + torch.finfo(dtype).eps
        figures |= {f"{name}_error": error, f"{name}_allowed": allowed}
        ok &= error <= allowed
    return Finding(f"parity {family} {str(dtype).removeprefix('torch.')}", ok, figures)


def random_decoder(config: dict[str, Any], device: torch.device) -> Decoder:
    """A model of full size whose weights never were anywhere but on the device."""
    family = family_of(config, "gpu_check")
    with torch.device("meta"):
        model = Decoder(family.read(config), Origin(family.name, config, ""))
    model.to(torch.bfloat16).to_empty(device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    return model


def row_of_all(documents: Sequence[Sample]) -> Batch:
    """Side by side in one row."""
    width = aligned(sum(len(document) for document in documents))
    return collate(Arrangement((tuple(range(len(documents))),), width), documents)


def row_of(tokens: int, vocabulary: int) -> Step:
    """One packed row of random documents with a long tail of lengths."""
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    documents = [sample(torch.randint(3, vocabulary, (length,))) for length in lengths]
    batch = row_of_all(documents)
    return Step(1, 0, (batch,), tuple(range(len(documents))), batch.tokens, batch.targets)


def steps_part(recompute: bool) -> str:
    return f"steps, recompute {'on' if recompute else 'off'}"


def steps(config: dict[str, Any], tokens: int, device: torch.device, recompute: bool) -> Iterator[Finding]:
    """LoRA on all linear layers of a bf16 model: peak memory and tokens a second of one packed row a step."""
    # Imported here, so that a package that only training needs cannot take the parity checks down with it.
    from glm_accelerate.models.adapt.lora import LoraSettings, add_lora
    from glm_accelerate.train.step import update

    start_peak(device)
    model = random_decoder(config, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    add_lora(model, LoraSettings())
    model.recompute = recompute
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=5e-4, weight_decay=0.0, fused=True)
    step = row_of(tokens, config["vocab_size"])
    seconds: list[float] = []
    losses: list[float] = []
    torch.manual_seed(0)  # the same dropout with and without recomputing
    for _ in range(WARMUP + MEASURED):
        began = time.perf_counter()
        # It reads the loss at its end, so the device has finished when the clock is read.
        outcome = update(model, optimizer, step, device, learning_rate=5e-4, limit=1.0)
        seconds.append(time.perf_counter() - began)
        losses.append(outcome.loss)
    middle = median(seconds[WARMUP:])
    peak = memory_peak(device)
    figures = {
        "parameters": parameters,
        "trainable": sum(p.numel() for p in trained),
        "tokens": step.tokens,
        "seconds": seconds,
        "tokens_per_second": step.tokens / middle,
        "weights_bytes": weights,
        "peak_bytes": peak,
        "peak_above_weights": None if peak is None else peak - weights,
        "losses": losses,
    }
    learns = all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    yield Finding(steps_part(recompute), learns, figures)


def start_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> int | None:
    """On a GPU, what tensors held at most; elsewhere the race measures it better."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where gpu.jsonl goes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--tokens", type=int, default=2_048, help="of the packed row")
    given = parser.parse_args(words)
    if not given.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: --tiny runs the same at tiny size on the CPU")
    device = torch.device("cpu" if given.tiny else "cuda")
    config, tokens = (TINY, 128) if given.tiny else (GLM_4_9B_0414, given.tokens)
    log = Log(given.out / ("gpu-tiny.jsonl" if given.tiny else "gpu.jsonl"))
    log.add(machine(device))
    log.attempt("parity", partial(parity, device))
    for recompute in (True, False):
        log.attempt(steps_part(recompute), partial(steps, config, tokens, device, recompute))
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
