"""Where answers in bfloat16 part: how close the two tokens were in float32, and how far bfloat16 moves the
likeliest logits there on either side. A gap that is smaller than what rounding moves decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from glm_accelerate.models.weights import load_model

LIKELIEST = 10


@dataclass(frozen=True)
class Parting:
    """Of one prompt: the first token that differs."""

    prompt: int
    place: int
    gap: float  # between the two tokens' logits, in float32
    moved_ours: float  # the most by which bfloat16 moves a logit of the likeliest
    moved_theirs: float

    @property
    def explained(self) -> bool:
        """Two logits can move towards one another."""
        return self.gap <= 2 * max(self.moved_ours, self.moved_theirs)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """None: the same as far as both go."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), None)
    return min(len(ours), len(theirs)) if place is None and len(ours) != len(theirs) else place


@torch.no_grad()
def partings(
    model: Path,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
    device: str,
) -> list[Parting]:
    """Every prompt's, if it has one, by a forward pass over what both had said until then."""
    from transformers import AutoModelForCausalLM

    exact = load_model(model, dtype=torch.float32).to(device).eval()
    rough = load_model(model, dtype=torch.bfloat16).to(device).eval()
    stock = cast(Any, AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)).to(device).eval()
    found: list[Parting] = []
    for number, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        place = first_difference(a, b)
        if place is None or place >= min(len(a), len(b)):
            continue
        tokens_1T = torch.tensor([prompt + a[:place]], device=device)

        exact_V, *rounded = (
            logits_1TV[0, -1].float()
            for logits_1TV in (exact(tokens_1T), rough(tokens_1T), stock(tokens_1T).logits)
        )
        likely = exact_V.topk(min(LIKELIEST, len(exact_V))).indices
        moved = [float((logits_V - exact_V)[likely].abs().max()) for logits_V in rounded]
        found.append(Parting(number, place, float((exact_V[a[place]] - exact_V[b[place]]).abs()), *moved))
    return found
