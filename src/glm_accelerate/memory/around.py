"""What is done around a block's passes with bytes for tensors: weights divided over ranks are gathered as
parallel/shard.py has FSDP2 do it, activations wait on the host as memory/offload.py moves them.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from glm_accelerate.memory.job import Job
from glm_accelerate.memory.offload import ROOM
from glm_accelerate.memory.rehearsal import Held, SimulatedMemory, Tape
from glm_accelerate.memory.weights import gathered_bytes, weights_of

ROOT = -1


class Divided:
    """A unit's weights are whole while it runs, the next one's ahead of need in backward; its gradients until
    all ranks have summed them. A unit is a block, or several that share projections; called by its first.

    `gradients`: this rank's parts, which stay until the update. `last`: whether this is a step's last pass;
    until then weights stay whole with ZeRO-2 and 1, and gradients with ZeRO-1.
    """

    def __init__(self, job: Job, room: SimulatedMemory, gradients: dict[object, Held], last: bool) -> None:
        self.job, self.room, self.gradients, self.last = job, room, gradients, last
        self.sizes: Counter[int] = Counter()  # whole bytes of each unit, and of the rest
        for weight in weights_of(job):
            self.sizes[self._unit(weight.block)] += gathered_bytes(job, weight)
        self.here: dict[int, Held] = {}
        self.unit = ROOT  # whose backward pass runs
        self.whole: list[Held] = []  # its gradients, before they are summed
        self.summing: Held | None = None

    @contextmanager
    def block(self, tape: Tape, number: int, learns: bool) -> Generator[None]:
        """Around a block's forward pass; its backward pass is marked on the tape."""
        unit = self._unit(number)
        if learns and number == unit:
            tape.mark(lambda: self.leave(unit))
        gathered = None if unit in self.here else self._gather(unit)
        if self.job.zero < 3 and gathered is not None:
            self.here[unit] = gathered
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

    def take(self, gradient: Held) -> None:
        """One weight's, to be summed with those of its unit, or added at once to what waits since before."""
        if ("whole", self.unit) not in self.gradients:
            self.whole.append(gradient)

    def enter(self, unit: int) -> None:
        """The backward pass of a unit begins: it is here, and the one before is on the way."""
        self.unit = unit
        for each in (unit, self._unit(unit - 1)):
            if each >= 0 and each not in self.here:
                self.here[each] = self._gather(each)

    def leave(self, unit: int) -> None:
        """A copy of its gradients is summed; the last one's lives until then."""
        if self.last or self.job.zero == 3:
            self.here.pop(unit, None)
        self.unit = ROOT
        before = self.gradients.pop(("whole", unit), None)
        size = sum(held.size for held in self.whole) if before is None else before.size
        if size and self.job.zero == 1 and not self.last:
            self.gradients["whole", unit] = before or Held(self.room, "gathered", size)
            self.whole.clear()
        elif size:
            before = None
            self.summing = None
            self.summing = Held(self.room, "gathered", size)
            self.whole.clear()
            part = Held(self.room, "gradients", -(-size // self.job.shards))
            self.gradients.setdefault(unit, part)

    def _unit(self, block: int) -> int:
        return block - block % self.job.sizes.shared_qk if block >= 0 else ROOT

    def _gather(self, unit: int) -> Held:
        size = self.sizes[unit]
        held = Held(self.room, "gathered", size)
        self.room.briefly(size, "gathered")  # as it comes, before each weight has its place
        return held


class OffloadedBytes:
    """What is away of all that blocks keep, and the most that was. The last to leave stay, and as many come
    back ahead of need.
    """

    def __init__(self, room: SimulatedMemory) -> None:
        self.room = room
        self.kept: list[int] = []
        self.away = self.most = 0

    @contextmanager
    def block(self, tape: Tape, number: int, learns: bool) -> Generator[None]:
        """Around a block's forward pass."""
        before = self._here()
        yield
        self.kept.append(self._here() - before)
        self._leave(len(self.kept))
        if learns:
            tape.mark(lambda: self._leave(number))

    def _here(self) -> int:
        return sum(self.room.now.get(kind, 0) for kind in ("activations", "copies"))

    def _leave(self, blocks: int) -> None:
        """Move out all but ROOM bytes of what the first so many blocks keep."""
        target = max(0, sum(self.kept[:blocks]) - ROOM)
        self.room.add("activations", self.away - target)
        self.away, self.most = target, max(self.most, target)
