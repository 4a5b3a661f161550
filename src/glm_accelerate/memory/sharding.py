"""A model divided over ranks, as parallel/shard.py has FSDP2 do it: a unit's weights are gathered while it
runs, the next one's ahead of need in backward; its gradients are whole until all ranks have summed them. A
unit is a block, or several that share projections.
"""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from glm_accelerate.memory.job import Job
from glm_accelerate.memory.rehearsal import Gradient, Held, SimulatedMemory, Tape
from glm_accelerate.memory.weights import weights_of

ROOT = -1


@dataclass(slots=True)
class Divided:
    """What is whole for a while. `gradients`: this rank's parts, which stay until the update."""

    job: Job
    room: SimulatedMemory
    gradients: dict[object, Held]
    sizes: Mapping[int, int]  # whole bytes of each unit by its first block, and of the rest
    here: dict[int, Held] = field(default_factory=dict[int, Held])
    whole: list[Held] = field(default_factory=list[Held])  # gradients before they are summed
    summing: Held | None = None

    @contextmanager
    def block(self, tape: Tape, number: int, learns: bool) -> Generator[None]:
        """Around a block's forward pass; its backward pass is marked on the tape."""
        unit = self._unit(number)
        if learns and number == unit:
            tape.mark(lambda: self.leave(unit))
        gathered = self._gather(unit)
        yield
        del gathered
        if learns:
            tape.mark(lambda: self.enter(unit))

    def begin(self) -> None:
        """What belongs to no block stays whole until the end."""
        self.here[ROOT] = self._gather(ROOT)

    def end(self) -> None:
        self.leave(ROOT)
        self.summing = None
        self.here.clear()

    def enter(self, number: int) -> None:
        """The backward pass of a unit begins: it is here, and the one before is on the way."""
        for each in (number, self._unit(number - 1)):
            if each >= 0 and each not in self.here:
                self.here[each] = self._gather(each)

    def leave(self, number: int) -> None:
        """A copy of its gradients is summed; the last one's lives until then."""
        self.here.pop(number, None)
        size = sum(held.size for held in self.whole)
        if size:
            self.summing = None
            self.summing = Held(self.room, "gathered", size)
            self.whole.clear()
            part = Held(self.room, "gradients", -(-size // self.job.shards))
            self.gradients.setdefault(number, part)

    def learn(self, _: Gradient, made: Held) -> None:
        """Whole for now."""
        self.whole.append(made)

    def _unit(self, block: int) -> int:
        """The first block of a block's unit."""
        return block - block % self.job.sizes.shared_qk if block >= 0 else block

    def _gather(self, number: int) -> Held:
        size = self.sizes[number]
        held = Held(self.room, "gathered", size)
        self.room.briefly(size, "gathered")  # as it comes, before each weight has its place
        return held


def whole_sizes(job: Job) -> Mapping[int, int]:
    """Bytes of each unit's weights, and of all others."""
    sizes: Counter[int] = Counter()
    for weight in weights_of(job):
        unit = weight.block - weight.block % job.sizes.shared_qk if weight.block >= 0 else ROOT
        sizes[unit] += int(weight.part(1) * weight.itemsize)
    return sizes
