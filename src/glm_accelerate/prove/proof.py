"""What a proof says: its name, whether it holds, and one line for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of one check at the start of a run."""

    name: str
    ok: bool
    said: str
    cure: str = ""
    binding: bool = True  # a run does not start where it fails; else that is a warning


def require(proofs: Sequence[Proof]) -> None:
    """A run does not start where a binding proof failed."""
    for proof in proofs:
        if not proof.ok and proof.binding:
            raise UserError(f"the proof of {proof.name} failed: {proof.said}", cure=proof.cure or None)
