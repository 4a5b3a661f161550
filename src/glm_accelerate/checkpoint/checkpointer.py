"""Saving beside the training: one copy of the state, then another process writes it. At most one save is
under way; `outcomes` reports one that fails, and what was published before stays as it was.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.format import Kind, read_manifest
from glm_accelerate.checkpoint.meeting import Meeting, Patience, SaveFailed
from glm_accelerate.checkpoint.staging import Pieces, Staging, in_place, plan
from glm_accelerate.checkpoint.write import SaveJob, point_to, write
from glm_accelerate.checkpoint.writer import WriterEnded, WriterProcess
from glm_accelerate.runtime.errors import UserError

GRACE = 5.0  # seconds beyond the limit, so that a writer that waits for other ranks can say so itself


@dataclass(frozen=True, slots=True)
class Save:
    """What is to be saved."""

    step: int
    attempt: int
    groups: Pieces
    state: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended. `bytes`: the first rank's are those of the whole checkpoint, another's its own."""

    step: int
    path: Path | None  # None: nothing was published
    bytes: int
    blocked_seconds: float
    total_seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """The save under way."""

    meeting: Meeting
    patience: Patience
    began: float
    blocked: float


class Checkpointer:
    """Saves of one rank of a run. Every rank has its own, and they save at the same steps."""

    def __init__(
        self,
        run: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        codec: str = "none",
        run_id: str = "",
        limit: float = 3600.0,  # seconds after which a save that writes nothing more is given up
        kind: Kind = "checkpoint",
    ) -> None:
        self._run, self._run_id = run, run_id
        self._kind: Kind = kind
        self._rank, self._ranks = rank, ranks
        self.codec, self._limit = codec, limit  # another codec counts from the next save on
        self._saves = 0
        self._staging: Staging | None = None
        self._writer: WriterProcess | None = None
        self._flight: _Flight | None = None
        self._ended: list[SaveOutcome] = []

    def stage(self, groups: Pieces) -> str | None:
        """Allocate the copy's memory and start the writer. Without it every save is written in place.
        Returns what the system refused, if the copy is slower for it.

        Only shapes and dtypes count here, so what does not exist yet may be given as a tensor on `meta`.
        """
        assert self._flight is None
        self._release()
        try:
            self._staging = Staging(groups, self._run)
        except OSError as error:
            raise UserError(f"no memory for a copy of the checkpoint's tensors: {error}") from error
        self._writer = WriterProcess(self._staging.job, self._staging.data)
        return self._staging.unlocked

    def busy(self) -> bool:
        """Whether a save is under way."""
        self._look(0.0)
        return self._flight is not None

    def save(self, save: Save, *, wait: bool = False) -> float:
        """Take the state as it is now. Returns the seconds for which training waited."""
        assert not self.busy(), "one save at a time"
        began = time.perf_counter()
        job = self._job(save)
        if self._staging is None:
            return self._write_here(job, save.groups, began)
        if not self._staging.fits(save.groups):
            self.stage(save.groups)
        self._staging.copy(save.groups)
        self._staging.leave(json.dumps(asdict(job), allow_nan=False).encode())
        if self._writer is None or not self._writer.alive:  # it has died meanwhile
            self._end_writer()
            self._writer = WriterProcess(self._staging.job, self._staging.data)
        self._writer.go()
        blocked = time.perf_counter() - began
        patience = Patience(job.meeting.directory, self._limit + GRACE)
        self._flight = _Flight(job.meeting, patience, began, blocked)
        while wait and self.busy():
            self._look(1.0)
        return time.perf_counter() - began if wait else blocked

    def outcomes(self) -> list[SaveOutcome]:
        """The saves that ended since this was last asked."""
        self._look(0.0)
        ended, self._ended = self._ended, []
        return ended

    def close(self, limit: float = math.inf) -> list[SaveOutcome]:
        """Wait for the save under way as long as it advances, but not longer than `limit` seconds, and let
        everything go.
        """
        ends = time.monotonic() + limit
        while self.busy() and (left := ends - time.monotonic()) > 0:
            self._look(min(left, 1.0))
        if self._flight is not None:
            self._lose(f"not written {limit:g} s after the end")
        self._release()
        return self.outcomes()

    def _job(self, save: Save) -> SaveJob:
        self._saves += 1
        meeting = Meeting(
            run=str(self._run),
            step=save.step,
            attempt=save.attempt,
            number=self._saves,
            rank=self._rank,
            ranks=self._ranks,
            limit=self._limit,
            kind=self._kind,
        )
        return SaveJob(meeting, self._run_id, self.codec, save.state, save.fingerprints, save.facts)

    def _write_here(self, job: SaveJob, groups: Pieces, began: float) -> float:
        size, error = 0, None
        planned = plan(groups)
        try:
            size = write(job, [piece for piece, _ in planned], in_place(planned))
        except SaveFailed as failed:
            error = str(failed)
        blocked = time.perf_counter() - began
        self._report(job.meeting, size, blocked, blocked, error)
        return blocked

    def _look(self, seconds: float) -> None:
        """Ask after the save under way, waiting at most so long."""
        flight = self._flight
        if flight is None or self._writer is None:
            return
        try:
            answer = self._writer.answer(seconds)
        except WriterEnded as ended:
            self._lose(f"the process that wrote it ended ({ended})")
            return
        if answer is not None:
            self._land(answer["bytes"], flight.blocked + answer["seconds"], answer["error"])
        elif flight.patience.over():
            self._lose(f"nothing more was written for {self._limit:g} s")

    def _lose(self, reason: str) -> None:
        """The writer did not finish and will not."""
        assert self._flight is not None
        assert self._writer is not None
        self._writer.kill()
        self._end_writer()
        meeting, size, error = self._flight.meeting, 0, reason
        manifest = read_manifest(meeting.target) if self._rank == 0 and meeting.target.is_dir() else None
        if manifest is not None and manifest.attempt == meeting.attempt:
            size, error = point_to(meeting, manifest), None  # published, but the writer could not say so
        else:
            meeting.give_up(reason)
        self._land(size, time.perf_counter() - self._flight.began, error)

    def _land(self, size: int, total: float, error: str | None) -> None:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self._report(flight.meeting, size, flight.blocked, total, error)

    def _report(self, meeting: Meeting, size: int, blocked: float, total: float, error: str | None) -> None:
        path = None if error else meeting.target
        self._ended.append(SaveOutcome(meeting.step, path, size, blocked, total, error))

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.end()
        self._writer = None

    def _release(self) -> None:
        self._end_writer()
        if self._staging is not None:
            self._staging.close()
        self._staging = None
