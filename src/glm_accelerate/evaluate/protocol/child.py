"""The trainer's end of its evaluator: a process that it starts, hears, and starts again, and never waits for.

Results come by the ledger; what is said here is only that the evaluator is ready, at work, or no more.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from glm_accelerate.evaluate.protocol.ledger import waiting, withdraw
from glm_accelerate.evaluate.protocol.messages import FOLDER, Request, parse_stem
from glm_accelerate.memory.monitor import NAMED, others_on
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.folders import make_folder, open_private
from glm_accelerate.runtime.host import Holder, host_memory
from glm_accelerate.runtime.words import amount

LOG = "evaluator.log"
PAUSE = 0.2  # seconds between two looks that ask the system
STRIKES = 2  # ends of the evaluator at one evaluation
LAST_WORDS = 5.0  # seconds for a process that is told to end
AT_ONCE = 1.0  # ... and for one that is killed: training goes on without its end
STARTING = 600.0  # ... at the least for one that starts, before it is taken to hang: it reads a whole model
LONGEST_LOG = 1 << 20  # bytes; then it is begun anew
LONGEST_LINE = 1000


def why_not(
    *, threads: int, cores: Sequence[int] | None, host_bytes: int, device: str = "cpu", device_bytes: int = 0
) -> str | None:
    """Why an evaluator cannot have what it needs on this machine, if so."""
    if sys.platform == "linux":
        ours = os.sched_getaffinity(0)
        if missing := sorted(set(cores or ()) - ours):
            return f"core {missing[0]} is not this process's to give: it has {sorted(ours)}"
        if cores is not None and threads > len(set(cores)):
            return f"{threads} threads on {len(set(cores))} cores"
    _, free = host_memory()
    if host_bytes > free:
        return f"it needs {amount(host_bytes)} of host memory, {amount(free)} are free"
    spare = torch.device(device)
    if not device_bytes or spare.type == "cpu":
        return None
    return taken(device, device_bytes, device_of(spare).unclaimed(), others_on(spare))


def taken(device: str, needed: int, free: int, others: Sequence[Holder]) -> str | None:
    """Why a device that training leaves free has no room, if so: somebody else may have, also one that is not
    seen from our container.
    """
    if needed <= free:
        return None
    said = f"it needs {amount(needed)} of {device}, {amount(free)} are free"
    return f"{said}, as others hold {', '.join(map(str, others[:NAMED]))}" if others else said


class Beside:
    """One evaluator process at a time. After `restarts` ends without a result between them it is given up."""

    def __init__(
        self,
        run: Path,
        *,
        device: str,
        threads: int,
        cores: Sequence[int] | None,
        restarts: int = 3,
        oldest: bool = False,
        build: str = "",
        host_bytes: int = 0,
        device_bytes: int = 0,
        pause: float = 1.0,
    ) -> None:
        """Starts it. A UserError says what it cannot have. `host_bytes`, `device_bytes`: that it will need;
        `pause`: seconds before the first new start, doubled with each.
        """
        reason = why_not(
            threads=threads, cores=cores, host_bytes=host_bytes, device=device, device_bytes=device_bytes
        )
        if reason is not None:
            raise UserError(f"no evaluator can run beside training: {reason}", cure="evaluate.where: inline")
        self._run, self._threads, self._cores = run, threads, tuple(cores or ())
        self._words = [str(run), "--device", device, "--child", *(["--oldest"] if oldest else [])]
        self._words += ["--build", build] if build else []
        self._restarts, self._pause = restarts, pause
        self._process: subprocess.Popen[bytes] | None = None
        self._lingering: list[subprocess.Popen[bytes]] = []  # killed, and not gone at once
        self._heard = b""
        self._ends = 0  # without a result between them
        self.at: str | None = None  # the stem of what it says it is at
        self._idle = 0.0  # since when it has taken nothing of what waits for it, and said nothing
        self._ended_at: Counter[str] = Counter()
        self._next_look = self._next_start = 0.0
        self.ready = self.given_up = False
        try:
            self._start()
        except OSError as error:
            cure = "evaluate.where: inline"
            raise UserError(f"no evaluator can be started beside training: {error}", cure=cure) from error

    def look(self) -> list[str]:
        """What has happened since, in words for the log; most times it asks nothing. Never waits."""
        now = time.monotonic()
        if self.given_up or now < self._next_look:
            return []
        self._next_look = now + PAUSE
        if self._process is None:
            if now < self._next_start:
                return []
            try:
                self._start()
            except OSError as error:
                return self._ended(f"it could not be started: {error}")
            return ["the evaluator is started again"]
        code = self._process.poll()
        self._hear()  # after that: then it is all that was said
        if code is None:
            return []
        if code == ExitCode.USERS_INPUT:  # the same would be wrong the next time
            self._ends = self._restarts
        return self._ended(f"signal {-code}" if code < 0 else f"exit code {code}")

    def kill(self, why: str, stem: str | None = None) -> list[str]:
        """End it wherever it is, stopped or hung, with all that it has started. `look` starts it again.
        With a `stem` only if it is at that one: another evaluator may be.
        """
        if self._process is None:
            return []
        self._hear()
        if stem is not None and stem != self.at:
            return []
        self._kill()
        return self._ended(why)

    def urge(self, limit: float | None) -> list[str]:
        """`limit`: seconds that something may wait for one that is at nothing; None: nothing does. One that
        lives and takes nothing of it hangs, and is ended; `look` starts it again.
        """
        if self._process is None:
            return []
        self._hear()
        if limit is None:
            self._idle = time.monotonic()
            return []
        limit = limit if self.ready else max(limit, STARTING)
        if time.monotonic() - self._idle <= limit:
            return []
        return self.kill(f"it has claimed nothing for {limit:g} s")

    def share(self, threads: int) -> None:
        """From its next evaluation on."""
        if threads != self._threads:
            self._threads = threads
            self._tell(f"threads {threads}")

    def close(self, limit: float) -> None:
        """Let it go: when nothing waits for it any more, at the latest after so many seconds."""
        ends = time.monotonic() + limit
        while not self.given_up and time.monotonic() < ends and waiting(self._run):
            self.look()
            time.sleep(PAUSE)
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS)
            self._kill()
        self._bury()
        self.given_up = True

    def _start(self) -> None:
        self._bury()
        folder = self._run / FOLDER
        make_folder(folder)
        log = folder / LOG
        mode = "wb" if log.is_file() and log.stat().st_size > LONGEST_LOG else "ab"
        # Nice and on its cores before torch is loaded; and our own path, no module of where we happen to be.
        begin = (
            f"import os, sys; os.nice(10); cores = {self._cores!r}; cores and os.sched_setaffinity(0, cores)"
        )
        ours = (
            f"sys.path[:] = {sys.path!r}; from glm_accelerate.evaluate.process import main; sys.exit(main())"
        )
        command = [sys.executable, "-P", "-c", f"{begin}; {ours}", *self._words]
        with open_private(log, mode) as noise:
            self._process = subprocess.Popen(
                [*command, "--threads", str(self._threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""
        self._idle = time.monotonic()

    def _hear(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._heard += self._process.stdout.read(1 << 16) or b""
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self.ready = True  # whatever it says, it says it when it is
            self._idle = time.monotonic()
            word, _, stem = line.decode("ascii", "replace").partition(" ")
            self.at = stem if word == "claimed" else None
            if word == "done":
                self._ends = 0

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it does not read, or has just died
                self._process.stdin.write(f"{line}\n".encode())

    def _ended(self, how: str) -> list[str]:
        """It is no more: wait a while longer each time, and at last do without."""
        self._let_go()
        self._ends += 1
        said = [f"the evaluator ended ({how}): {_last_line(self._run / FOLDER / LOG)} ({FOLDER}/{LOG})"]
        said += self._strike(how)
        if self._ends > self._restarts:
            self.given_up = True
            return [*said, "the evaluator is given up"]
        self._next_start = time.monotonic() + self._pause * 2 ** (self._ends - 1)
        return said

    def _strike(self, how: str) -> list[str]:
        """An evaluation that has ended it twice is let be, as one that takes more memory than there is."""
        stem, self.at = self.at, None
        parsed = None if stem is None else parse_stem(stem)
        if stem is None or parsed is None:
            return []
        self._ended_at[stem] += 1
        if self._ended_at[stem] < STRIKES:
            return []
        step, plan, attempt = parsed
        reason = f"the evaluator ended {STRIKES} times while at it ({how})"
        said = f"step {step} is not evaluated: {reason}"
        try:
            withdraw(self._run, Request(step, plan, attempt, ""), "failed", reason)
        except OSError as error:
            return [f"{said}; that cannot be written: {error}"]
        return [said]

    def _kill(self) -> None:
        """It and its children: it leads a session of its own."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(AT_ONCE)
        except subprocess.TimeoutExpired:  # in a call that the system does not interrupt, as to a lost disk
            self._lingering.append(self._process)
        self._hear()
        self._let_go()

    def _bury(self) -> None:
        """Those that are gone by now, so that the system forgets them."""
        self._lingering = [process for process in self._lingering if process.poll() is None]

    def _let_go(self) -> None:
        process = self._process
        self._process, self.ready = None, False
        for pipe in () if process is None else (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LONGEST_LINE))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError as error:
        return f"its log cannot be read: {error}"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
