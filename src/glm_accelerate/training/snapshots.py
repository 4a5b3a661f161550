"""The published weights that evaluations refer to: snapshots, which evaluators read, and the best ones.

A snapshot is published as checkpoints are, and deleted when no evaluation needs it any more. The file `best`
of a run names the weights that its evaluations found best.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.checkpoint.find import BEST, best_of, published
from glm_accelerate.checkpoint.format import path_of, step_of
from glm_accelerate.checkpoint.retain import drop
from glm_accelerate.runtime.files import write_text


def wait_for(snapshots: Checkpointer, limit: float) -> None:
    """Wait until none is being written any more, at most `limit` seconds."""
    ends = time.monotonic() + limit
    while snapshots.busy() and time.monotonic() < ends:
        time.sleep(0.02)


def keep_snapshots(run: Path, steps: Collection[int]) -> None:
    """Delete those of all other steps, unless they are being read. What fails is tried again next time."""
    for path in published(run, "snapshot"):
        if step_of(path.name, "snapshot") not in steps:
            with suppress(OSError):
                drop(path)


@dataclass(slots=True)
class BestWeights:
    """`awaited`: the best step, until weights of it are published. Inline its checkpoint may follow later."""

    run: Path
    awaited: int | None = None

    def name(self, step: int | None) -> None:
        """Write the name of this step's weights; None: no step is the best. Until there are weights of it,
        those that were named before stay.
        """
        paths = [] if step is None else [path_of(self.run, kind, step) for kind in ("snapshot", "checkpoint")]
        found = next((path for path in paths if path.is_dir()), None)
        self.awaited = step if found is None else None
        if found is not None:
            write_text(self.run / BEST, f"{found.relative_to(self.run).as_posix()}\n")
        elif step is None or best_of(self.run) is None:
            self.clear()

    def clear(self) -> None:
        (self.run / BEST).unlink(missing_ok=True)
