"""The weights that evaluators read: published as a checkpoint is, kept while anybody may still want them.

publish (one copy, training goes on) -> ... -> landed -> asked, evaluated -> keep: the others go
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.format import WEIGHTS, place, step_of
from glm_accelerate.checkpoint.retain import drop
from glm_accelerate.train.state import Pieces


@dataclass(slots=True)
class Snapshots:
    """One rank's part in them. All ranks publish the same steps."""

    run: Path
    checkpointer: Checkpointer
    attempt: int
    hold: Callable[[], Pieces]  # what training moves
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]

    def stage(self) -> None:
        """Make the copy's memory before it is needed."""
        self.checkpointer.stage(self._weights())

    def busy(self) -> bool:
        """Whether one is still being written."""
        return self.checkpointer.busy()

    def publish(self, step: int) -> float:
        """Take the weights as they are. Returns the seconds for which training waited."""
        save = Save(step, self.attempt, self._weights(), {}, self.fingerprints, self.facts)
        return self.checkpointer.save(save)

    def landed(self) -> list[SaveOutcome]:
        """Those that ended since this was last asked."""
        return self.checkpointer.outcomes()

    def wait(self, limit: float) -> None:
        """Until none is being written any more, or so many seconds."""
        ends = time.monotonic() + limit
        while self.busy() and time.monotonic() < ends:
            time.sleep(0.02)

    def close(self, limit: float) -> list[SaveOutcome]:
        """Wait for the one under way, and let the memory go."""
        return self.checkpointer.close(limit)

    def path(self, step: int) -> Path:
        """Where one is, or would be."""
        return place(self.run, "snapshot", step)

    def there(self) -> list[int]:
        """Steps that have one."""
        folder = self.path(0).parent
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(step for name in names if (step := step_of(name, "snapshot")) is not None)

    def keep(self, steps: Collection[int]) -> None:
        """Delete all others but those that somebody reads. What cannot go now is tried again next time."""
        for step in self.there():
            if step not in steps:
                try:
                    drop(self.path(step))
                except OSError:
                    continue

    def _weights(self) -> Pieces:
        return {WEIGHTS: self.hold()[WEIGHTS]}
