"""One save, cut off at one point: a real process, killed by the system at one of its calls."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from kill_sweep import judge, saver
from kill_sweep.judge import Verdict
from kill_sweep.power import OUTCOMES, Disk, Remains, rebuild
from kill_sweep.trace import PATIENCE, Call, attach, read

from tests.warm import SERVER

Point = TypeVar("Point")

CLEANING = ("unlink", "unlinkat", "rmdir")  # what cannot be removed is swept later


@dataclass(frozen=True)
class Observed:
    """What a crash at one point left, and what was wrong with that."""

    point: str
    verdict: Verdict


@dataclass(frozen=True)
class Loss:
    """What a power loss leaves."""

    point: str
    remains: list[Remains]
    done: bool  # the save had said so


@dataclass(frozen=True)
class Counted:
    """A save that nobody disturbed."""

    calls: list[Call]
    losses: list[Loss]  # before the first of them, and after each


def count(way: saver.Way, run: Path) -> Counted:
    """The calls of a save: the points at which it can be cut off."""
    with _process(way, run) as (_, wire):
        pid = _receive(wire)
        disk = Disk(run)
        tracer = attach(pid, _log(run))
        _finish(wire, tracer)
        calls = [call for call in read(_log(run)) if call.changes(run)]
        losses = _losses(disk, calls)
        if way is not saver.dcp_in_place:
            told = _saved_again(wire)
            assert told == [(1, None), (2, None), (3, None)], told
    assert len({call.thread for call in calls}) == 1, "several threads: `when` counts in each by itself"
    return Counted(calls, losses)


def kill(way: saver.Way, run: Path, point: Call) -> Observed:
    """SIGKILL at the call, before it is done. A trainer that lives on has to hear of it, and saves again."""
    with _process(way, run) as (_, wire):
        pid = _receive(wire)
        tracer = attach(pid, _log(run), f"{point.name}:signal=KILL:when={point.number}")
        wire.send(False)
        tracer.wait(PATIENCE)
        last = read(_log(run), pid)[-1]
        hit = (last.name, last.number) == (point.name, point.number) and last.text.endswith("= ?")
        assert hit, f"not killed at {point} but at {last}"
        if way is saver.dcp_in_place:
            return Observed(_name(point, run), judge.torch_dcp(run))
        verdict = judge.ours(run)
        if way is saver.behind:
            _receive(wire)
            first, (step, error), *later = _saved_again(wire)
            # A writer that dies after it has published is believed: what it wrote is there, and whole.
            told = error is None if verdict.left == "step 2" else error is not None and "signal 9" in error
            heard = step == 2 and told
            if not heard or [first, *later] != [(1, None), (3, None)]:
                verdict.faults.append(f"the trainer heard {error} of step {step}, then {later}")
    verdict.faults.extend(judge.goes_on(run))
    return Observed(_name(point, run), verdict)


def fail(way: saver.Way, run: Path, point: Call) -> Observed:
    """The call fails: the disk is full, or broken. The save says so and cleans up; the next one works."""
    error = "EIO" if point.name == "fsync" else "ENOSPC"
    with _process(way, run) as (_, wire):
        pid = _receive(wire)
        tracer = attach(pid, _log(run), f"{point.name}:error={error}:when={point.number}")
        _finish(wire, tracer)
        (hit,) = [call for call in read(_log(run), pid) if call.text.endswith("(INJECTED)")]
        assert (hit.name, hit.number) == (point.name, point.number), f"{hit} failed, not {point}"
        verdict = judge.ours(run)
        first, (step, told), *later = _saved_again(wire)
        cleans = point.name in CLEANING
        if not cleans and (step != 2 or told is None):
            verdict.faults.append(f"{error} was not told")
        if [first, *later] != [(1, None), (3, None)]:
            verdict.faults.append(f"of the next save the trainer heard {later}")
        if not cleans and (left := judge.leftovers(run)):
            verdict.faults.append(f"not cleaned up: {left}")
    verdict.faults.extend(judge.goes_on(run))
    return Observed(_name(point, run), verdict)


def orphan(run: Path, point: Call) -> Observed:
    """SIGKILL of the trainer when its writer has just done the call: the writer has to go with it."""
    with _process(saver.behind, run) as (process, wire):
        pid = _receive(wire)
        tracer = attach(pid, _log(run), f"{point.name}:signal=STOP:when={point.number}")
        wire.send(False)
        ends = time.monotonic() + PATIENCE
        while "stopped by SIGSTOP" not in _log(run).read_text():
            assert time.monotonic() < ends, f"never stopped at {point}"
            time.sleep(0.002)
        process.kill()
        try:
            tracer.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)  # it outlived its trainer: the test fails, and nothing stays behind
            raise
        last = read(_log(run), pid)[-1]
    assert (last.name, last.number) == (point.name, point.number), f"{last} came after {point}"
    verdict = judge.ours(run)
    verdict.faults.extend(judge.goes_on(run))
    return Observed(_name(point, run), verdict)


def lose_power(way: saver.Way, run: Path, loss: Loss) -> Observed:
    """What is to be found at the next start. What was said to be saved has to be there."""
    shutil.rmtree(run, ignore_errors=True)
    rebuild(loss.remains, run)
    if way is saver.dcp_in_place:
        return Observed(loss.point, judge.torch_dcp(run))
    verdict = judge.ours(run)
    if loss.done and verdict.left != "step 2":
        verdict.faults.append("the save was done and is lost")
    verdict.faults.extend(judge.goes_on(run))
    return Observed(loss.point, verdict)


def spread(points: Sequence[Point], share: float) -> list[Point]:
    """So many of them, evenly."""
    count = max(1, round(len(points) * share))
    return [points[(2 * number + 1) * len(points) // (2 * count)] for number in range(count)]


def _losses(disk: Disk, calls: Sequence[Call]) -> list[Loss]:
    losses = [Loss(f"before: {outcome}", disk.crash(outcome), False) for outcome in OUTCOMES]
    for call in calls:
        disk.apply(call)
        done, after = call is calls[-1], f"after {call.name} {call.number}"
        losses += [Loss(f"{after}: {outcome}", disk.crash(outcome), done) for outcome in OUTCOMES]
    disk.learn()
    return losses


def _finish(wire: Connection, tracer: "subprocess.Popen[bytes]") -> None:
    """Let the save be done, and trace no further."""
    wire.send(True)
    _receive(wire)
    tracer.terminate()
    tracer.wait(PATIENCE)


def _saved_again(wire: Connection) -> list[tuple[int, str | None]]:
    """How all saves of the process ended."""
    wire.send(None)
    return _receive(wire)


def _name(point: Call, run: Path) -> str:
    """The call as a table names it, without what differs from run to run."""
    text = point.text.partition(" = ")[0].replace(f"{run}/", "").replace(str(run), ".")
    text = re.sub(
        r'\d+<[^>]*>, (?=")|AT_FDCWD<[^>]*>, |, O_.*|, 0\d*\)|""\.\.\., |\d+(?=<)|(?<=latest)\.\w+', "", text
    )
    return f"{text.rstrip(') ')})"


def _receive(wire: Connection) -> Any:
    assert wire.poll(PATIENCE), "the process that saves says nothing"
    return wire.recv()


def _log(run: Path) -> Path:
    return run.with_name(f"{run.name}.strace")


@contextmanager
def _process(way: saver.Way, run: Path) -> Generator[tuple[ForkServerProcess, Connection]]:
    """A process that saves. Forked from one that has torch loaded: that takes longer than all the rest."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    here, there = multiprocessing.Pipe()
    process = SERVER.Process(target=way, args=(run, there))
    process.start()
    there.close()
    with here:
        try:
            yield process, here  # pyright: ignore[reportReturnType]
        finally:
            process.kill()
            process.join(PATIENCE)
            process.close()
