"""N processes on this machine: started and watched by torch's elastic agent, started again when one dies.

launcher (this file) -> agent (a thread) -> ranks, each of which runs `entry(task)` and answers an exit code
Signals are passed on and end the job; a silent rank is named, then killed; a job that fails again and again
without getting further is given up.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from glm_accelerate.parallel import heartbeat
from glm_accelerate.runtime import env
from glm_accelerate.runtime.stopped import STOPPED, STOPPED_AT_ONCE

ATTEMPTS = 3  # in a row without progress, before a job is given up
POLL = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Entry = Callable[[Any], int]  # a module's own function, and plain data for it: both travel to the processes


def launch(entry: Entry, task: object, ranks: int, progress: Callable[[], int], final: int) -> int:
    """Runs `entry(task)` in `ranks` processes until it answers. `progress`: the newest step that is saved;
    `final`: the exit code of a rank that has said what is wrong, so that starting again is of no use.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the launcher says the same in a line
    env.share_cores(ranks)
    env.one_range()
    with tempfile.TemporaryDirectory(prefix="glm-accelerate-", ignore_cleanup_errors=True) as folder:
        env.share_signs(Path(folder))
        job = _Job(Path(folder), entry, task, ranks, final)
        before = [signal.signal(number, job.stop) for number in SIGNALS]
        try:
            return _until_it_answers(job, progress)
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


def _until_it_answers(job: "_Job", progress: Callable[[], int]) -> int:
    failures = 0
    while True:
        reached = progress()
        code = job.attempt()
        if code is not None:
            return code
        if job.stopping:
            _say(STOPPED_AT_ONCE)
            return STOPPED
        failures = 0 if progress() > reached else failures + 1
        if failures == ATTEMPTS:
            _say(f"given up: {failures} attempts in a row ended without getting further than step {reached}")
            return 1
        _say(f"starting again from step {progress()}")


@dataclass(slots=True)
class _Job:
    """What is run, and what the launcher remembers between attempts."""

    folder: Path  # of signs of life
    entry: Entry
    task: object
    ranks: int
    final: int
    stopping: bool = False
    named: set[int] = field(default_factory=set[int])
    deaf: float = 0.0  # when no sign of life could be written the last time

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass it on: the ranks end their step, save, and answer. The second Ctrl-C is meant at once."""
        if self.stopping and number == signal.SIGINT:
            self._signal_all(signal.SIGKILL)
            _say(STOPPED_AT_ONCE)
            os._exit(STOPPED)
        self.stopping = True
        heartbeat.ask_to_stop(self.folder)
        self._signal_all(signal.SIGTERM)

    def attempt(self) -> int | None:
        """One life of the job: its exit code, or None if a rank died."""
        with ThreadPoolExecutor(1) as agent:
            code, looked = agent.submit(self._run), time.monotonic()
            while not code.done():
                wait([code], POLL)
                slept = time.monotonic() - looked > heartbeat.QUIET  # we were stopped ourselves
                looked = time.monotonic()
                if not slept:
                    self._watch()
        return code.result()

    def _run(self) -> int | None:
        # The ranks inherit it from this thread: they hear Ctrl-C when they are ready to. The tracker, which
        # comes with the first of them, would unblock it (Python 3.11), so it is started before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=self.folder.name,
            max_restarts=0,  # the launcher starts again, and counts only what brings no progress
            monitor_interval=0.1,
        )
        try:
            answers = elastic_launch(config, self.entry)(self.task)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            if first.exitcode == self.final:
                return self.final
            how = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
            if not self.stopping:
                _say(f"rank {rank} (process {first.pid}) ended by {how}")
            return None
        return max(answers.values())

    def _watch(self) -> None:
        silent = [sign for sign in heartbeat.signs(self.folder) if sign.seconds >= heartbeat.QUIET]
        self.named &= {sign.process for sign in silent}
        if silent and not heartbeat.writable(self.folder):
            if not self.deaf:
                _say(f"no signs of life can be written to {self.folder}: until they can, none are missed")
            self.deaf = time.monotonic()
        listening = time.monotonic() - self.deaf
        for sign in silent:
            seconds = min(sign.seconds, listening)
            if seconds >= heartbeat.QUIET and sign.process not in self.named:
                self.named.add(sign.process)
                _say(str(sign))
            elif seconds > heartbeat.LOST:
                _say(f"killing rank {sign.rank}")
                _signal(sign.process, signal.SIGKILL)
                heartbeat.forget(self.folder, sign.rank)

    def _signal_all(self, number: signal.Signals) -> None:
        for sign in heartbeat.signs(self.folder):
            _signal(sign.process, number)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _say(message: str) -> None:
    sys.stderr.write(f"launcher: {message}\n")
    sys.stderr.flush()
