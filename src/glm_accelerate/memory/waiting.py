"""Activations that wait on the host, as memory/offload.py moves them: the last ones to leave stay, and as
many come back ahead of need.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from glm_accelerate.memory.offload import ROOM
from glm_accelerate.memory.rehearsal import SimulatedMemory, Tape


@dataclass(slots=True)
class OffloadedBytes:
    """What is away of all that blocks keep, and the most that was."""

    room: SimulatedMemory
    kept: list[int] = field(default_factory=list[int])
    away: int = 0
    most: int = 0

    @contextmanager
    def block(self, tape: Tape, number: int, learns: bool) -> Generator[None]:
        """Around a block's forward pass."""
        before = self._here()
        yield
        self.kept.append(self._here() - before)
        self._leave_but(ROOM, len(self.kept))
        if learns:
            tape.mark(lambda: self._leave_but(ROOM, number))

    def _here(self) -> int:
        return sum(self.room.now.get(kind, 0) for kind in ("activations", "copies"))

    def _leave_but(self, stays: int, blocks: int) -> None:
        """Of what the first so many blocks keep, `stays` bytes are here."""
        target = max(0, sum(self.kept[:blocks]) - stays)
        self.room.add("activations", self.away - target)
        self.away, self.most = target, max(self.most, target)
