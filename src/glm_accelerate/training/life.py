"""Whose work this is: the run, this attempt at it, this process's place in it, and what it leaves behind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint import retain
from glm_accelerate.checkpoint.format import FOLDER
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.place import Place
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Life:
    """One process in one attempt, from its first step to its last, and where its events go."""

    run: Path
    run_id: str
    attempt: int
    place: Place
    events: Events

    @property
    def ranks(self) -> Ranks:
        """All of the job."""
        return self.place.ranks

    def warn(self, *sentences: str) -> None:
        """Warn the user."""
        for sentence in sentences:
            self.events.emit("warning", {"said": sentence})


@dataclass(slots=True)
class Branch:
    """What earlier attempts did beyond the step that this start goes on from. The first save or request gives
    it up: checkpoints, results and snapshots are moved aside in one moment, so that what is there belongs
    together. All ranks call `give_up` at the same steps.
    """

    life: Life
    step: int  # -1: a start at the beginning
    named: bool  # the user named the step: else what is beyond it is damaged, or to be begun anew
    given_up: bool = False
    after: Callable[[], None] | None = None  # called once it is given up

    def give_up(self) -> None:
        """Before this start writes anything beyond its step. One that ends before has changed nothing."""
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
