"""When a run saves, how saves end, and what stays: the checkpointer as the loop sees it.

due -> save (one copy, training goes on) -> ... -> check: published, or failed with a warning -> retain
"""

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.checkpoint import codec
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.format import WEIGHTS
from glm_accelerate.checkpoint.policy import Measured, is_due
from glm_accelerate.checkpoint.retain import choose_stale, delete, present
from glm_accelerate.checkpoint.staging import as_bytes
from glm_accelerate.config.schema import CheckpointSection
from glm_accelerate.evaluate.statistics.decide import best
from glm_accelerate.observe.events import Past, read_past
from glm_accelerate.optim.mover import Mover
from glm_accelerate.runtime import env
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.host import host_memory
from glm_accelerate.runtime.words import amount
from glm_accelerate.training.life import Branch, Life
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.state import Pieces, Progress, resume_tensors

MOMENT = 30.0  # seconds that an error waits for what is being written
AFTER_A_RANK = 3.0  # ... if it is that another rank ended: the part that it did not write will not come
WEIGHED = 256e6  # bytes of a checkpoint from which on compressing may save time
SAMPLE = 16 * 2**20  # bytes of the weights that are compressed to find out


@dataclass(slots=True)
class Saver:
    """One rank's part in every save of a run. All ranks call the same methods at the same steps."""

    life: Life
    checkpointer: Checkpointer
    section: CheckpointSection
    last_step: int
    past: Past  # earlier attempts of this run
    progress: Progress
    best: Callable[[], int | None]  # the step that evaluations have found best so far
    branch: Branch  # that of earlier attempts, which gives way to the first checkpoint of this start
    pieces: Callable[[], Pieces]  # weights and moments as they are
    settle: Callable[[], None]  # what is decided only where a checkpoint holds it
    wanted: Callable[[], bool]  # whether such a decision is due
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]
    skipped: int = 0
    packing: bool = False  # the first rank's: files are to be compressed from the next save on
    _began: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)  # when the last save began
    _published: SaveOutcome | None = None  # the last one that was published
    _ready: bool = False
    _bytes: int = 0
    _failed: dict[int, str] = field(default_factory=dict[int, str])
    _directory: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        self._directory = _identity(self.life.run)

    def due(self, step_seconds: float) -> bool:
        """Whether a checkpoint should follow the step that took so long. The first rank decides."""
        if not self.life.ranks.first:
            return False
        if self.section.keep_best > 0 and self.best() == self.progress.position:
            return True  # the evaluation after this very step found it better than all before
        if self.wanted():
            return True
        now, last = time.perf_counter(), self._published
        measured = Measured(
            step=self.progress.position,
            since_save=now - self._last,
            step_seconds=step_seconds,
            state_bytes=self._bytes,
            blocked_seconds=last.blocked_seconds if last else None,
            write_seconds=last.total_seconds if last else None,
            failures=self.past.failures,
            wall_seconds=self.past.seconds + now - self._began,
        )
        return is_due(self.section, measured)

    def save(self, *, final: bool = False) -> None:
        """Take the state as it is. Nothing is queued: while one is still being written, this one is left out.

        `final`: training has ended, so it waits for the one before and for this one.
        """
        step = self.progress.position
        while final and self.checkpointer.busy():
            time.sleep(0.02)
        busy, packing = self.life.ranks.total([self.checkpointer.busy(), self.packing])
        if packing:
            self.checkpointer.codec = "zstd"
        if busy:
            self.skipped += 1
            what = f"no checkpoint at step {step}: the one before is still being written"
            self.life.warn(f"{what} ({self.skipped} left out so far)")
            return
        self.branch.give_up()
        self.settle()
        self._last = time.perf_counter()
        facts = {**self.facts, "loss": self.progress.losses.get(step)}
        if self.progress.level.jumped is not None:
            facts["suspect"] = self.progress.level.jumped
        state = self.progress.to_json()
        save = Save(step, self.life.attempt, self.pieces(), state, self.fingerprints, facts)
        self.checkpointer.save(save, wait=final)

    def check(self) -> None:
        """Between two steps: report how saves ended. After the first, when there are moments, get ready."""
        if self.life.ranks.first and _identity(self.life.run) != self._directory:
            raise UserError(
                "this run's directory was moved or replaced while it trained",
                where=self.life.run,
                cure="move it back and run the same command again: it goes on from its last checkpoint",
            )
        for outcome in self.checkpointer.outcomes():
            self._report(outcome)
        if not self._ready:
            self._ready = True
            self._make_ready()

    def abandon(self, *, rank_ended: bool) -> None:
        """The run ends by an error: what is being written gets a moment, and nothing hides the error."""
        for outcome in self.checkpointer.close(AFTER_A_RANK if rank_ended else MOMENT):
            self._report(outcome)

    def finish(self) -> None:
        """The end of the run: everything is on disk when this returns, or it raises."""
        for outcome in self.checkpointer.close():
            self._report(outcome)
        position = self.progress.position
        if position in self._failed:
            raise UserError(
                f"the last checkpoint could not be written: {self._failed[position]}",
                where=self.life.run,
                cure="run the same command again: the checkpoints before it are whole",
            )

    def _make_ready(self) -> None:
        """Memory for the copy, unless no save will have training to go on beside it."""
        pieces = self.pieces()
        needed = sum(part.local.nbytes for group in pieces.values() for part in group.values())
        self._bytes = needed
        every, left = self.section.every, self.last_step - self.progress.position
        if self.section.wait or left <= (1 if every == "auto" else every):
            return
        _, free = host_memory()  # before any rank takes of it
        here = [
            size
            for node, size in self.life.ranks.gather([platform.node(), needed])
            if node == platform.node()
        ]
        if sum(here) * 2 > free:
            copies = "a copy takes" if len(here) == 1 else f"the copies of {len(here)} ranks take"
            what = f"checkpoints stop training while they are written: {copies} {amount(sum(here))}"
            self.life.warn(f"{what}, {amount(free)} are free")
            return
        refused = self.checkpointer.stage(pieces)
        if refused is not None:
            self.life.warn(f"the memory for checkpoints cannot be locked ({refused}): the copy takes longer")

    def _weigh_codec(self, outcome: SaveOutcome) -> None:
        """Whether compressing saves time here, from what the first checkpoint took and a sample."""
        tensor = max((part.local for part in self.pieces()[WEIGHTS].values()), key=torch.Tensor.numel)
        sample = tensor.detach().flatten()[: SAMPLE // tensor.element_size()].cpu()
        taken = torch.get_num_threads() if tensor.device.type == "cpu" else 1
        disk = outcome.bytes / 1e6 / outcome.total_seconds
        choice = codec.choose(as_bytes(sample), tensor.element_size(), disk, env.cores() - taken)
        self.packing = choice.codec == "zstd"
        self.life.events.emit("decision", {"said": f"checkpoint.codec: {choice.codec} ({choice.reason})"})

    def _report(self, outcome: SaveOutcome) -> None:
        if outcome.error is not None:
            self._failed[outcome.step] = outcome.error
            what = f"the checkpoint of step {outcome.step} was NOT written: {outcome.error}"
            self.life.warn(f"{what}; training goes on")
            return
        first, self._published = self._published is None, outcome
        if not self.life.ranks.first or outcome.path is None:
            return
        if first and self.section.codec == "auto" and outcome.bytes >= WEIGHED:
            self._weigh_codec(outcome)
        self.life.events.emit(
            "checkpoint",
            {
                "step": outcome.step,
                "path": f"checkpoints/{outcome.path.name}",
                "bytes": outcome.bytes,
                "blocked_seconds": outcome.blocked_seconds,
                "total_seconds": outcome.total_seconds,
            },
        )
        progress = self.progress
        entries = present(
            self.life.run,
            run_id=self.life.run_id,
            losses=progress.judging.losses,
            best=self.best(),
            pending=progress.judging.pending,
            jumped=progress.level.jumped,
        )
        retained = delete(self.life.run, choose_stale(entries, self.section, time.time()))
        for step, reason in retained.failed.items():
            self.life.warn(f"the checkpoint of step {step} could not be deleted: {reason}")


def _identity(directory: Path) -> tuple[int, int] | None:
    """Which directory it is: the same one as long as a file in it is open, as the log is."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def saver_of(
    settled: Settled,
    life: Life,
    mover: Mover,
    progress: Progress,
    branch: Branch,
    settle: Callable[[], None],
    wanted: Callable[[], bool],
) -> Saver:
    """The saver of a run."""
    config, plan, launched = settled.config, settled.plan, env.launched()
    job = launched.job if launched is not None else ""
    return Saver(
        life,
        Checkpointer(
            life.run, rank=life.ranks.rank, ranks=life.ranks.count, codec=plan.codec, run_id=life.run_id
        ),
        config.checkpoint,
        plan.steps,
        read_past(life.run / "events.jsonl"),
        progress,
        best=lambda: best(progress.judging.prefix, config.evaluate.margin),
        branch=branch,
        pieces=lambda: resume_tensors(mover),
        settle=settle,
        wanted=wanted,
        fingerprints=settled.prints,
        facts={"template": plan.template, "method": config.adapt.method, "job": job},
    )
