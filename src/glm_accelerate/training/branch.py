"""What earlier attempts did beyond the step from which a start goes on: their branch, which is given up.

a start at a step that the user has named -> the branch stays whole -> the first save or question: moved aside
Checkpoints, results and snapshots go in the same moment, so that what is there always belongs together.
"""

from collections.abc import Callable
from dataclasses import dataclass

from glm_accelerate.checkpoint import retain
from glm_accelerate.checkpoint.format import FOLDER
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.life import Life


@dataclass(slots=True)
class Branch:
    """All ranks call `give_up` at the same steps."""

    life: Life
    step: int  # -1: a start at the beginning
    named: bool  # by the user: else what is beyond the step is damaged, or to be begun anew
    given_up: bool = False
    after: Callable[[], None] | None = None  # it was given up

    def give_up(self) -> None:
        """Before anything of this start lies beyond its step. One that ends before has changed nothing."""
        if self.given_up:
            return
        self.life.ranks.decide(self._move_aside)
        self.given_up = True
        if self.after is not None:
            self.after()

    def _move_aside(self) -> None:
        run = self.life.run
        try:
            retain.sweep(run / FOLDER)
            retain.abandon_after(run, self.step)
            ledger.abandon_after(run, self.step, self.life.attempt)
        except OSError as error:
            what = f"what is later than step {self.step} cannot be moved aside: {error.strerror}"
            raise UserError(what, where=error.filename or run) from error
