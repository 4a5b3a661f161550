"""The axes along which the ranks of a job are laid out: arithmetic from sizes to coordinates."""

from dataclasses import asdict, dataclass
from math import prod

# Outermost first. Ranks next to each other share a machine: the innermost axes talk most.
ORDER = ("pipeline", "data", "shard", "expert", "context", "tensor")
SAMPLES = ("data", "shard", "expert")  # ranks that differ along these take different samples
LOSS = tuple(name for name in ORDER if name != "tensor")  # ... and along these, different parts of the loss


@dataclass(frozen=True, slots=True)
class Axes:
    """How many ranks there are along each axis. The product is the number of ranks."""

    pipeline: int = 1
    data: int = 1  # each holds the whole state
    shard: int = 1  # FSDP divides the state along it
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """By name, outermost first."""
        named = asdict(self)
        return {name: named[name] for name in ORDER}

    def count(self, *names: str) -> int:
        """How many ranks there are along these axes together."""
        return prod(self.sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, found[name] = divmod(rank, size)
        assert rank == 0, f"there are {self.count(*ORDER)} ranks"
        return found

    def index(self, rank: int, *names: str) -> int:
        """The number of a rank among those along these axes."""
        number, at = 0, self.coordinates(rank)
        for name in ORDER:
            if name in names:
                number = number * self.sizes[name] + at[name]
        return number

    def groups(self, *names: str) -> list[list[int]]:
        """All groups of ranks that differ from each other along these axes alone."""
        found: dict[int, list[int]] = {}
        rest = [name for name in ORDER if name not in names]
        for rank in range(self.count(*ORDER)):
            found.setdefault(self.index(rank, *rest), []).append(rank)
        return list(found.values())
