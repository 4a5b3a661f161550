"""What a proof says: its name, whether it holds, and one line for people."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of one check at the start of a run."""

    name: str
    ok: bool
    said: str
    cure: str = ""
    binding: bool = True  # a run does not start where it fails; else that is a warning
