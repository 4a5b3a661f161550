"""Signs of life: each rank writes one every second, the launcher names the rank from which none came.

A stopped or hung process is seen in seconds; without this, the others wait for it in a collective for as
long as that may take. One file a rank in a directory of the launcher's: no network, no lock. Where none can
be written, as on a full disk, all are silent and training goes on.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 1.0
QUIET = 5.0  # seconds without a sign after which a rank is named
LOST = 30.0  # ... and after which it is killed, so that the job can go on from its last checkpoint
PROBE = 512  # bytes, more than a sign has


@dataclass(slots=True)
class Doing:
    """What a rank is at. The training loop sets it, the beating thread writes it."""

    step: int = 0
    phase: str = "starting"


@contextmanager
def beating(folder: Path | None, rank: int, doing: Doing) -> Generator[None, None, None]:
    """Writes signs of life while entered, if someone watches. A thread, so it stops when the process does."""
    if folder is None:
        yield
        return
    file = _file(folder, rank)
    ended = threading.Event()

    def sign() -> None:
        state = {"process": os.getpid(), "step": doing.step, "phase": doing.phase, "at": time.monotonic()}
        fresh = file.with_suffix(".new")
        with suppress(OSError):  # the launcher sees that they cannot be written
            fresh.write_text(json.dumps(state), encoding="utf-8")
            fresh.replace(file)

    def leave() -> None:
        with suppress(OSError):
            file.unlink(missing_ok=True)  # gone on purpose is not silent
            if orphaned():
                folder.rmdir()  # the last one can

    def beat() -> None:
        asked = False
        while not ended.wait(INTERVAL):
            sign()
            if asked or not orphaned():
                continue
            if doing.step == 0:  # nothing to save, and a rank that waits for its peers handles no signal
                leave()
                os._exit(1)
            asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    sign()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        leave()


def orphaned() -> bool:
    """Whether the launcher that started this process is gone."""
    launcher = multiprocessing.parent_process()
    return launcher is not None and os.getppid() != launcher.pid


@dataclass(frozen=True, slots=True)
class Sign:
    """The last sign of a rank, and how many seconds ago it came."""

    rank: int
    process: int
    seconds: float
    step: int
    phase: str

    @property
    def stopped(self) -> bool:
        """Whether its process is held by a signal (SIGSTOP, Ctrl-Z) or a debugger."""
        return _state(self.process) in ("T", "t")

    def __str__(self) -> str:
        stopped = " (it is stopped)" if self.stopped else ""
        where = f"step {self.step}, {self.phase}"
        return (
            f"rank {self.rank}, process {self.process}, is silent for {self.seconds:.0f} s{stopped}: {where}"
        )


def signs(folder: Path) -> list[Sign]:
    """Every rank's last sign of life."""
    last: list[Sign] = []
    for file in sorted(folder.glob("rank-*.json")):
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # ended, or replaced while we looked
            continue
        ago = time.monotonic() - state["at"]  # one clock for the whole machine
        if _state(state["process"]) in ("", "Z"):  # dead: whoever started it knows
            continue
        last.append(Sign(int(file.stem[5:]), state["process"], ago, state["step"], state["phase"]))
    return last


def writable(folder: Path) -> bool:
    """Whether a sign could be written now; if not, silence means nothing."""
    probe = folder / "probe"
    try:
        probe.write_bytes(bytes(PROBE))
        probe.unlink()
    except OSError:
        return False
    return True


def forget(folder: Path, rank: int | None = None) -> None:
    """Remove the sign of a rank whose process is gone; by default of all."""
    for file in folder.glob("rank-*.json") if rank is None else [_file(folder, rank)]:
        file.unlink(missing_ok=True)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _state(process: int) -> str:
    """The kernel's letter for the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""
