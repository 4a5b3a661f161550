"""Logits and gradients of a packed row against transformers, which gets one document at a time; and that a
run, as the trainer sets it up, computes the same bits twice.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

from benchmarks.gpu.finding import Finding
from benchmarks.gpu.model import GLM_4_9B_0414, TINY, random_decoder
from glm_accelerate.data.pack import Arrangement, aligned
from glm_accelerate.data.pipeline import collate
from glm_accelerate.data.types import Batch, FilePlace, Sample
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.seed import repeat_exactly
from glm_accelerate.training.step import WholeModel

LENGTHS = (5, 17, 64, 42)  # documents of the packed row


@dataclass(frozen=True)
class Outputs:
    """What is compared between two models."""

    logits: Tensor
    gradient: Tensor


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


def parity(device: torch.device, tiny: bool) -> Iterator[Finding]:
    """Of both families, in float32 and bfloat16."""
    for family in ("glm4", "glm"):
        theirs = oracle(family)
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            theirs.to(device)
            documents = [torch.randint(3, TINY["vocab_size"], (length,)) for length in LENGTHS]
            exact = by_document(theirs.double(), documents)
            for dtype in (torch.float32, torch.bfloat16):
                ours = load_model(directory, dtype=dtype, device=device)
                bind_operators(ours)
                yield compare(
                    family, dtype, packed(ours, documents), by_document(theirs.to(dtype), documents), exact
                )
    yield twice(device, tiny)


def twice(device: torch.device, tiny: bool) -> Finding:
    """Gradients of a block of full size: enough tokens and documents for sums that race to differ."""
    torch.manual_seed(0)
    model = random_decoder((TINY if tiny else GLM_4_9B_0414) | {"num_hidden_layers": 1}, device)
    model.requires_grad_(True)
    lengths = LENGTHS if tiny else (9_000, 3_001, 4_000, 17)
    documents = [torch.randint(3, model.sizes.vocabulary, (length,)) for length in lengths]
    batch = row_of_all([sample(tokens) for tokens in documents])
    gradients: list[list[Tensor]] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with repeat_exactly(device):
            WholeModel(model, device).loss_of(batch, 1.0).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    apart = sum(not torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    return Finding("same gradients twice", apart == 0, {"of": len(gradients[0]), "that differ": apart})


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
    model.requires_grad_(True)
    device = model.embed.device
    positions_T = torch.cat([torch.arange(len(tokens)) for tokens in documents]).to(device)
    logits = model(torch.cat(documents)[None].to(device), positions_T[None])[0]
    WholeModel(model, device).loss_of(row_of_all([sample(tokens) for tokens in documents]), 1.0).backward()
    assert model.embed.grad is not None
    return Outputs(logits.detach(), model.embed.grad.detach())


def sample(tokens: Tensor) -> Sample:
    learnt = np.ones(len(tokens), dtype=bool)
    return Sample(tokens.numpy().astype(np.int32), learnt, FilePlace("random", 1))


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


def row_of_all(documents: Sequence[Sample]) -> Batch:
    """Side by side in one row."""
    width = aligned(sum(len(document) for document in documents))
    return collate(Arrangement((tuple(range(len(documents))),), width), documents)
