"""Whose work this is: the run, this attempt at it, this process's place in it, and where events go."""

from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.place import Place
from glm_accelerate.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Life:
    """Of one process in one attempt, from its first step to its last."""

    run: Path
    run_id: str
    attempt: int
    place: Place
    events: Events

    @property
    def ranks(self) -> Ranks:
        """All of the job."""
        return self.place.ranks
