"""Where the ranks of a job meet to make one checkpoint: a temporary directory that all of them see.

Each leaves a note there of what it wrote, or of why it could not. The first rank makes the directory, reads
the notes, and publishes or gives up. No rank needs to hear another in any other way.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.format import Kind, path_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import sync, write_text

FIRST_LOOK, SLOWEST_LOOK = 0.005, 0.25  # seconds between two looks at the others


class SaveFailed(UserError):
    """A checkpoint was not written. Those before it are untouched."""


class Patience:
    """How long to wait for a save: as long as the files in its directory grow or are touched, and then
    `limit` seconds. So a slow disk loses no save, and one that hangs ends.
    """

    def __init__(self, directory: Path, limit: float) -> None:
        self._directory, self._limit = directory, limit
        self._seen, self._moved = 0, time.monotonic()
        self._look = self._moved

    def over(self) -> bool:
        now = time.monotonic()
        if now >= self._look:  # seldom: the directory may be on another machine
            self._look = now + self._limit / 8
            seen = _activity(self._directory)
            if seen != self._seen:
                self._seen, self._moved = seen, now
        return now > self._moved + self._limit


@dataclass(frozen=True, slots=True)
class Meeting:
    """One save, as this rank takes part in it."""

    run: str
    step: int
    attempt: int
    number: int  # of this job's saves: tells a second try at the same step from the first
    rank: int
    ranks: int
    limit: float  # seconds to wait for other ranks, after anything was last written
    kind: Kind = "checkpoint"

    @property
    def target(self) -> Path:
        return path_of(Path(self.run), self.kind, self.step)

    @property
    def directory(self) -> Path:
        """Beside the target, so that the rename stays on one file system."""
        return self.target.with_name(f".{self.target.name}.{self.attempt}")

    def begin(self) -> None:
        """The first rank makes the directory, the others wait for it."""
        if self.rank:
            self._await(
                lambda: self._require_going_on() and self.directory.is_dir(), lambda: "rank 0 did not begin"
            )
            return
        self.target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync(self.target.parent.parent)  # also where an earlier attempt made it and was cut off
        if self.target.exists():
            raise SaveFailed("it is published already, and is never written again")
        _remove(self.directory)  # of an interrupted save of the same step
        if self.ranks > 1:
            for note in self.target.parent.glob(f".{self.kind}-*.failed"):
                note.unlink(missing_ok=True)
        self.directory.mkdir(mode=0o700)

    def report(self, note: Mapping[str, Any]) -> None:
        """This rank's files are written and synced."""
        write_text(self._note(self.rank), json.dumps(note))

    def gather(self) -> list[dict[str, Any]]:
        """The notes of all ranks but the first. Raises when one has failed, or is too late."""
        notes: dict[int, dict[str, Any]] = {}

        def everybody() -> bool:
            there = set(os.listdir(self.directory)) if self.ranks > 1 else set[str]()
            for rank in range(1, self.ranks):
                if self._failure(rank).name in there:
                    reason = self._failure(rank).read_text(encoding="utf-8")
                    raise SaveFailed(f"rank {rank} failed: {reason}")
                if rank not in notes and self._note(rank).name in there:
                    notes[rank] = json.loads(self._note(rank).read_text(encoding="utf-8"))
            return len(notes) == self.ranks - 1

        def missing() -> str:
            late = ", ".join(str(rank) for rank in range(1, self.ranks) if rank not in notes)
            return f"rank {late} did not finish"

        self._await(everybody, missing)
        for rank in notes:
            self._note(rank).unlink()
        return [notes[rank] for rank in sorted(notes)]

    def await_publication(self) -> None:
        """Until the first rank has published, or given up."""
        self._await(
            lambda: self.target.is_dir() or not self._require_going_on(),
            lambda: "rank 0 did not publish in time",
        )

    def give_up(self, reason: str) -> None:
        """The first rank removes everything and tells the others why; another one tells it why it has to."""
        with contextlib.suppress(OSError):  # on a full disk: time limits say it then
            if self.rank == 0:
                _remove(self.directory)
                if self.ranks > 1:
                    write_text(self._given_up, json.dumps([self.number, reason]))
            elif self.directory.is_dir():
                write_text(self._failure(self.rank), reason)

    def _require_going_on(self) -> bool:
        """Raises when the first rank has given this save up."""
        if self._given_up.is_file():
            number, reason = json.loads(self._given_up.read_text(encoding="utf-8"))
            if number == self.number:
                raise SaveFailed(f"rank 0 failed: {reason}")
        return True

    @property
    def _given_up(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.failed")

    def _note(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _failure(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.failed"

    def _await(self, over: Callable[[], bool], late: Callable[[], str]) -> None:
        """Look again and again until it is over, or patience is."""
        patience = Patience(self.directory, self.limit)
        pause = FIRST_LOOK
        while not over():
            if patience.over():
                raise SaveFailed(f"{late()} in {self.limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK)


def _activity(directory: Path) -> int:
    """A number that is another one whenever a file there grows or is touched."""
    state = 0
    # The directory is made later, or has just been published.
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            state += entry.stat().st_size + entry.stat().st_mtime_ns
    return state


def _remove(directory: Path) -> None:
    """Take it away also from under a rank that still writes there: it finds the name gone."""
    trash = directory.with_name(f"{directory.name}.{os.getpid()}.trash")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)  # what cannot be removed now is swept at the next start
