"""SIGTERM and Ctrl-C to the whole process group, in every phase of a run: it ends with 75, leaves no process
and nothing broken, and the same command goes on to the same last bit. One run takes all signals in turn.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.checkpoint.audit import audit, compare
from glm_accelerate.checkpoint.find import published
from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE
from tests.processes import children_of
from tests.warm import Warm

Said = dict[str, Any]
STEPS, SAVE, EVALUATE = 100, 5, 10
TRIES = 5  # to hit a phase of milliseconds
MARK = "GLM_ACCELERATE_TEST"


@dataclass(frozen=True)
class Job:
    """A run that has been started, seen from outside."""

    run: Path
    cache: Path
    process: int
    ranks: int
    log_size: int  # of events.jsonl when it began
    began: float

    def new(self, name: str) -> bool:
        """Whether it has written this file of the run's directory."""
        path = self.run / name
        return path.exists() and path.stat().st_mtime > self.began

    def events(self) -> list[Said]:
        """Its own so far."""
        path = self.run / "events.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.log_size)
            return [
                json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")
            ]

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events() if event["kind"] == "step"]

    def trainers(self) -> list[int]:
        """The processes that train: itself, or those that it launched."""
        return [self.process] if self.ranks == 1 else list(children(self.process))

    def workers(self) -> list[int]:
        """Those that prepare data."""
        return [worker for trainer in self.trainers() for worker in children(trainer, "serve(")]

    def unpublished(self, pattern: str) -> bool:
        return any((self.run / "checkpoints").glob(f".checkpoint-{pattern}"))

    def is_evaluating(self) -> bool:
        events = self.events()
        return bool(events) and events[-1]["kind"] == "step" and events[-1]["step"] % EVALUATE == 0


def children(process: int, words: str = "") -> Iterator[int]:
    """Those whose command line has these words."""
    for child in children_of(process):
        if words in reading(Path(f"/proc/{child}/cmdline")):
            yield child


def reading(path: Path) -> str:
    """Nothing, where the process has just ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def loads_torch(processes: Sequence[int]) -> bool:
    return any("libtorch_cpu" in reading(Path(f"/proc/{process}/maps")) for process in processes)


def size_of_building(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.glob(".building-*/*") if file.exists())


@dataclass(frozen=True)
class Point:
    """A phase, how it is known, and what a signal in it may come to."""

    name: str
    reached: Callable[[Job], bool]
    codes: frozenset[int] = frozenset({75})
    times: int = 1  # that the signal is sent


DIED = frozenset({75, 1, -signal.SIGTERM, -signal.SIGINT})  # Python's own answers, before it hears us
ENDED = frozenset({75, 0})

POINTS = [
    Point("the interpreter starts", lambda job: True, DIED),
    Point("torch is loaded", lambda job: loads_torch([job.process])),
    Point("a trainer starts", lambda job: loads_torch(job.trainers())),
    Point("the directory is locked", lambda job: job.new("lock")),
    Point("data preparation begins", lambda job: any(job.cache.glob(".building-*"))),
    Point("workers prepare data", lambda job: len(job.workers()) == 2),
    Point("samples are written", lambda job: size_of_building(job.cache) > 1 << 19),
    Point("all is proved, the plan is written", lambda job: job.new("plan.json")),
    Point("evaluation before training", lambda job: bool(job.events())),
    Point("the first step", lambda job: bool(job.steps())),
    Point("a resumed run begins", lambda job: bool(job.events())),
    Point("steps", lambda job: len(job.steps()) >= 7),
    Point("a save begins", lambda job: job.unpublished("*")),
    Point("a save has written tensors", lambda job: job.unpublished("*/optimizer-*")),
    Point("a save has just ended", lambda job: any(event["kind"] == "checkpoint" for event in job.events())),
    Point("evaluation", Job.is_evaluating),
    Point("a save, and the signal comes twice", lambda job: job.unpublished("*"), times=2),
    Point("the last step", lambda job: STEPS in job.steps(), ENDED),
    Point("the last save", lambda job: job.unpublished(f"{STEPS}.*"), ENDED),
    Point("the end", lambda job: any(event["kind"] == "stop" for event in job.events()), ENDED),
]
FEW = (1, 5, 7, 13, 15)


class Signalled:
    """One run and its command."""

    def __init__(
        self,
        said: Said,
        folder: Path,
        warm: Callable[..., Warm],
        ranks: int,
        number: signal.Signals,
        whole_group: bool = True,
    ) -> None:
        self.run, self.cache, self.folder = folder / "run", Path(said["data"]["cache"]), folder
        self.warm, self.ranks, self.number = warm, ranks, number
        self.send = os.killpg if whole_group else os.kill
        self.environment = {**os.environ, MARK: str(folder)}

    def command(self, run: Path) -> list[str]:
        return ["train", str(self.folder / "run.yaml"), "--run", str(run), "--nproc", str(self.ranks)]

    def finish(self, run: Path) -> None:
        answer = self.warm(*self.command(run)).done()
        assert answer.returncode == 0, answer.stderr

    def strike(self, point: Point) -> None:
        """Signals the run in this phase; if it got past it, everything is as before and it is tried again."""
        before = self.folder / "before"
        shutil.rmtree(before, ignore_errors=True)
        if self.run.exists():
            shutil.copytree(self.run, before, symlinks=True)
        for _ in range(TRIES):
            code = self._try(point)
            if code is not None:
                break
            self._restore(before)
        else:
            pytest.fail(f"{point.name}: missed {TRIES} times")
        said = (self.folder / "output").read_text()
        assert code in point.codes, (point.name, code, said)
        assert "Traceback" not in said or point.codes == DIED, (point.name, said)
        assert code != 75 or len(re.findall("run the same command again", " ".join(said.split()))) == 1, said
        self._judge(point)
        if point.codes == ENDED:
            self.finish(self.run)
            assert not list(compare(*(run / "checkpoints" / f"checkpoint-{STEPS}" for run in self.both())))
            self._restore(before)

    def both(self) -> tuple[Path, Path]:
        """The run, and one that nothing interrupts."""
        whole = self.folder / "whole"
        if not whole.exists():
            self.finish(whole)
        return self.run, whole

    def _try(self, point: Point) -> int | None:
        log = self.run / "events.jsonl"
        size = log.stat().st_size if log.exists() else 0
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "glm_accelerate.cli.main", *self.command(self.run)],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
            )
            job = Job(self.run, self.cache, process.pid, self.ranks, size, time.time() - 0.01)
            while not point.reached(job):
                if process.poll() is not None:
                    assert process.returncode == 0, (self.folder / "output").read_text()
                    return None
                time.sleep(0.001)
            for _ in range(point.times):
                self.send(process.pid, self.number)
                time.sleep(0.05 * (point.times - 1))
            return process.wait(timeout=120)

    def _restore(self, before: Path) -> None:
        shutil.rmtree(self.run)
        if before.exists():
            shutil.copytree(before, self.run, symlinks=True)

    def _judge(self, point: Point) -> None:
        deadline = time.monotonic() + 60
        while survivors(str(self.folder)):
            assert time.monotonic() < deadline, (point.name, survivors(str(self.folder)))
            time.sleep(0.02)
        there = published(self.run)
        assert not [said for path in there for said in audit(path).damaged], point.name
        steps = [event["step"] for event in read_events(self.run / "events.jsonl") if event["kind"] == "step"]
        if steps:  # not one of them is lost
            assert there[0].name == f"checkpoint-{max(steps)}", point.name


def survivors(mark: str) -> list[str]:
    """Command lines of processes that belong to the run."""
    return [
        reading(environment.with_name("cmdline"))
        for environment in Path("/proc").glob("[0-9]*/environ")
        if f"{MARK}={mark}\0" in reading(environment)
    ]


@pytest.fixture
def said(tiny_run: Said, tmp_path: Path) -> Said:
    """Two workers have something to do: four portions of a megabyte."""
    train = Path(tiny_run["data"]["train"])
    lines = train.read_text(encoding="utf-8")
    train.write_text(lines * ((4 << 20) // len(lines.encode()) + 1), encoding="utf-8")
    said = {
        **tiny_run,
        "data": {**tiny_run["data"], "workers": 2},
        "train": {"steps": STEPS, "step_samples": 4},
        "evaluate": {**tiny_run["evaluate"], "every": EVALUATE},
        "checkpoint": {"every": SAVE},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    return said


def strike_all(signalled: Signalled, points: Sequence[Point]) -> None:
    for point in points:
        signalled.strike(point)
    one, whole = signalled.both()
    signalled.finish(one)
    assert not list(compare(*(run / "checkpoints" / f"checkpoint-{STEPS}" for run in (one, whole))))
    kinds = [event["kind"] for event in read_events(one / "events.jsonl")]
    assert "start" not in kinds[kinds.index("step") :]  # it never began anew


def test_a_few_phases(said: Said, tmp_path: Path, warm: Callable[..., Warm]) -> None:
    strike_all(Signalled(said, tmp_path, warm, 1, signal.SIGTERM), [POINTS[place] for place in FEW])


@pytest.mark.parametrize(
    ("number", "place", "whole_group"), [(signal.SIGTERM, 2, False), (signal.SIGINT, 5, True)]
)
def test_ranks_that_start(
    number: signal.Signals,
    place: int,
    whole_group: bool,
    said: Said,
    tmp_path: Path,
    warm: Callable[..., Warm],
) -> None:
    """A container's end is told to its first process alone, the launcher."""
    Signalled(said, tmp_path, warm, 2, number, whole_group).strike(POINTS[place])


LOST = "time.sleep(50)"  # ... in a callback
CHANGED = "raise TypeError('what a function written in C made of it') from interrupt"


@pytest.mark.parametrize(("then", "said"), [(LOST, f"{STOPPED_AT_ONCE}\n"), (CHANGED, "")])
def test_whatever_becomes_of_the_interrupt_the_process_stops(then: str, said: str) -> None:
    program = f"""
import os, signal, sys, time
from glm_accelerate.training import stop
stop.MOMENT = 0.2
try:
    with stop.stopping_at_once():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as interrupt:
            {then}
except KeyboardInterrupt:
    sys.exit(75)
"""
    answer = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (75, said)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_phases(
    ranks: int, number: signal.Signals, said: Said, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    assert len(POINTS) == 20
    strike_all(Signalled(said, tmp_path, warm, ranks, number), POINTS)
