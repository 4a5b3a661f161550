"""The weights that evaluators read: published as checkpoints are, deleted when no evaluation needs them.

publish (one copy, training goes on) -> ... -> outcomes -> requested, evaluated -> keep: delete the others
"""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import WEIGHTS, place, step_of
from glm_accelerate.checkpoint.retain import drop
from glm_accelerate.training.state import Pieces


@dataclass(slots=True)
class Snapshots:
    """One rank's part in them. All ranks publish the same steps."""

    run: Path
    checkpointer: Checkpointer
    attempt: int
    state: Callable[[], Pieces]  # weights and moments as they are
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]

    def stage(self) -> None:
        """Allocate the copy's memory before it is needed."""
        self.checkpointer.stage(self._weights())

    def busy(self) -> bool:
        """Whether one is still being written."""
        return self.checkpointer.busy()

    def publish(self, step: int) -> float:
        """Copy the weights as they are. Returns the seconds for which training waited."""
        save = Save(step, self.attempt, self._weights(), {}, self.fingerprints, self.facts)
        return self.checkpointer.save(save)

    def outcomes(self) -> list[SaveOutcome]:
        """Of snapshots that were written since the last call."""
        return self.checkpointer.outcomes()

    def wait(self, limit: float) -> None:
        """Until none is being written any more, at most `limit` seconds."""
        ends = time.monotonic() + limit
        while self.busy() and time.monotonic() < ends:
            time.sleep(0.02)

    def close(self, limit: float) -> list[SaveOutcome]:
        """Wait for the one that is being written, and free the memory."""
        return self.checkpointer.close(limit)

    def path(self, step: int) -> Path:
        """Where one is, or would be."""
        return place(self.run, "snapshot", step)

    def keep(self, steps: Collection[int]) -> None:
        """Delete all others but those that are being read. What fails is tried again next time."""
        for path in published(self.run, "snapshot"):
            if step_of(path.name, "snapshot") not in steps:
                with suppress(OSError):
                    drop(path)

    def _weights(self) -> Pieces:
        return {WEIGHTS: self.state()[WEIGHTS]}
