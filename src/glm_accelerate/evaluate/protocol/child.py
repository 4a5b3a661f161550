"""The evaluator that a trainer starts as its child: polled, restarted when it ends, and never waited for.

Results come through the ledger. The child's pipe says only that it is ready, and which request it works on.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol.ledger import withdraw
from glm_accelerate.evaluate.protocol.messages import FOLDER, Request, parse_stem
from glm_accelerate.memory.monitor import NAMED, others_on
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime import env
from glm_accelerate.runtime.child import how_ended, python_command
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.files import make_folder, open_private
from glm_accelerate.runtime.host import Holder, host_memory
from glm_accelerate.runtime.words import amount

LOG = "evaluator.log"
CHILD = "glm_accelerate.evaluate.measuring.serve"
NICENESS = 10  # training goes first
PAUSE = 0.2  # seconds between two polls that ask the system
RESTARTS = 3  # ends without a result between them, until it is given up
FIRST_RESTART = 1.0  # seconds before it, doubled with each
MOST_FAILURES = 2  # ends of the evaluator during one evaluation
TERMINATING = 5.0  # seconds for a process to end by itself
KILLING = 1.0  # ... and for one that is killed: training goes on without waiting for its end
STARTING = 600.0  # ... at the least for one that starts, before it counts as hung: it reads a whole model
LONGEST_LOG = 1 << 20  # bytes; then it is begun anew
LONGEST_LINE = 1000
INLINE = "evaluate.where: inline"


def start_beside(run: Path, plan: RunPlan, section: EvaluateSection) -> "EvaluatorProcess":
    """The evaluator that the plan has beside training. A UserError says why it cannot be."""
    items = () if plan.memory is None else plan.memory.items
    needed = sum(item.bytes for item in items if item.what == "evaluator")
    lacking = lacking_memory("host memory", needed, host_memory()[1])
    device = torch.device(plan.evaluate_device)
    if lacking is None and plan.evaluate_bytes and device.type != "cpu":
        free, others = device_of(device).unclaimed(), others_on(device)
        lacking = lacking_memory(plan.evaluate_device, plan.evaluate_bytes, free, others)
    if lacking is not None:
        raise UserError(f"no evaluator can run beside training: {lacking}", cure=INLINE)
    spare = env.cores() - plan.ranks * torch.get_num_threads()
    on_spare_cores = plan.device == "cpu" and spare >= plan.evaluate_threads
    cores = env.last_cores(plan.evaluate_threads) if on_spare_cores else None
    oldest = section.keep == "all" or section.decides
    return EvaluatorProcess(
        run, plan.evaluate_device, threads=plan.evaluate_threads, cores=cores or (), oldest=oldest
    )


def lacking_memory(what: str, needed: int, free: int, others: Sequence[Holder] = ()) -> str | None:
    """Why there is too little memory for an evaluator, if so. A device that training leaves free may be held
    by other processes, also by some that cannot be seen from our container.
    """
    if needed <= free:
        return None
    reason = f"it needs {amount(needed)} of {what}, {amount(free)} are free"
    return f"{reason}, as others hold {', '.join(map(str, others[:NAMED]))}" if others else reason


class EvaluatorProcess:
    """One evaluator process at a time. After RESTARTS ends without a result between them it is given up."""

    def __init__(
        self,
        run: Path,
        device: str,
        *,
        threads: int = 1,
        cores: Sequence[int] = (),
        oldest: bool = False,
        build: str = "",
    ) -> None:
        """Starts it. `threads`: while several requests wait, else one; `cores`: those that it may run on,
        none: any; `oldest`: the oldest request first; `build`: with an examiner of the user's own.
        """
        self._run, self._cores = run, tuple(cores)
        self._arguments = (str(run), device, threads, oldest, build)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []  # that did not end at once
        self._unread = b""  # the beginning of a line
        self._ends = 0  # without a result between them
        self.working_on: str | None = None  # a request's stem
        self._idle_since = 0.0  # without a message, while a request waits
        self._failures: Counter[str] = Counter()  # by stem
        self._next_poll = self._next_start = 0.0
        self.ready = self.given_up = False
        try:
            self._start()
        except OSError as error:
            raise UserError(f"no evaluator can be started beside training: {error}", cure=INLINE) from error

    def poll(self) -> list[str]:
        """What has happened since, as sentences for the log. Never waits, and asks the system rarely."""
        now = time.monotonic()
        if self.given_up or now < self._next_poll:
            return []
        self._next_poll = now + PAUSE
        if self._process is None:
            if now < self._next_start:
                return []
            try:
                self._start()
            except OSError as error:
                return self._after_end(f"it could not be started: {error}")
            return ["the evaluator is started again"]
        code = self._process.poll()
        self._receive()  # after the poll: then nothing it wrote is missed
        if code is None:
            return []
        if code == ExitCode.USERS_INPUT:  # the same would be wrong the next time
            self._ends = RESTARTS
        return self._after_end(how_ended(code))

    def kill(self, why: str, stem: str | None = None) -> list[str]:
        """End it even if it is stopped or hangs, with all its children; `poll` starts it again. With a `stem`
        only if it works on that request: another evaluator may do so.
        """
        if self._process is None:
            return []
        self._receive()
        if stem is not None and stem != self.working_on:
            return []
        self._kill()
        return self._after_end(why)

    def end_if_idle(self, limit: float | None) -> list[str]:
        """Kill it if it has claimed nothing for `limit` seconds; `poll` starts it again. None: no request
        waits for it.
        """
        if self._process is None:
            return []
        self._receive()
        if limit is None:
            self._idle_since = time.monotonic()
            return []
        limit = limit if self.ready else max(limit, STARTING)
        if time.monotonic() - self._idle_since <= limit:
            return []
        return self.kill(f"it has claimed nothing for {limit:g} s")

    def close(self) -> None:
        """End it; what it has claimed is free again."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATING)
            self._kill()
        self._reap()
        self.given_up = True

    def _start(self) -> None:
        self._reap()
        folder = self._run / FOLDER
        make_folder(folder)
        log = folder / LOG
        mode = "wb" if log.is_file() and log.stat().st_size > LONGEST_LOG else "ab"
        cores = f"cores = {self._cores!r}; cores and os.sched_setaffinity(0, cores)"
        nice = f"import os; os.nice({NICENESS}); {cores}"  # before torch is loaded
        call = f"from {CHILD} import serve; sys.exit(serve{self._arguments!r})"
        with open_private(log, mode) as output:
            self._process = subprocess.Popen(
                python_command(f"{nice}; {call}"),
                stdin=subprocess.PIPE,  # closes when we end, and so it does
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        self._idle_since = time.monotonic()

    def _receive(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._unread += self._process.stdout.read(1 << 16) or b""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self.ready = True  # it sends nothing before it is
            self._idle_since = time.monotonic()
            word, _, stem = line.decode("ascii", "replace").partition(" ")
            self.working_on = stem if word == "claimed" else None
            if word == "done":
                self._ends = 0

    def _after_end(self, how: str) -> list[str]:
        """Plan its restart, a while later each time; at last give it up."""
        self._close_pipes()
        self._ends += 1
        sentences = [f"the evaluator ended ({how}): {_last_line(self._run / FOLDER / LOG)} ({FOLDER}/{LOG})"]
        sentences += self._count_failure(how)
        if self._ends > RESTARTS:
            self.given_up = True
            return [*sentences, "the evaluator is given up"]
        self._next_start = time.monotonic() + FIRST_RESTART * 2 ** (self._ends - 1)
        return sentences

    def _count_failure(self, how: str) -> list[str]:
        """Withdraw a request that has ended the evaluator twice, as by taking more memory than there is."""
        stem, self.working_on = self.working_on or "", None
        self._failures[stem] += 1
        parsed = parse_stem(stem)
        if parsed is None or self._failures[stem] < MOST_FAILURES:
            return []
        step, exam_id, attempt = parsed
        reason = f"the evaluator ended {MOST_FAILURES} times while at it ({how})"
        sentence = f"step {step} is not evaluated: {reason}"
        try:
            withdraw(self._run, Request(step, exam_id, attempt, ""), "failed", reason)
        except OSError as error:
            return [f"{sentence}; that cannot be written: {error}"]
        return [sentence]

    def _kill(self) -> None:
        """Kill it with its children: it leads a session of its own."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILLING)
        except subprocess.TimeoutExpired:  # in a call that the system does not interrupt, as to a lost disk
            self._killed.append(self._process)
        self._receive()
        self._close_pipes()

    def _reap(self) -> None:
        """Let the system forget killed processes that have ended by now."""
        self._killed = [process for process in self._killed if process.poll() is None]

    def _close_pipes(self) -> None:
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
