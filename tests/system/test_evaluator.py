"""Bad days of an evaluator beside training (class G of the faults): real processes, a user's own module."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.audit import audit
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.checkpoint.retain import drop
from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.child import EvaluatorProcess
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Request, exam_id_of
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as Linux has them")

OWN = '''
"""An examiner of one's own: a linear layer, 64 questions, and a bad day if RUN/mood says so."""
import math, os, resource, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.evaluate.protocol.messages import Findings
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, exam_id_of


class Own:
    def __init__(self, run):
        draw = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(64, 8, generator=draw), torch.randint(4, (64,), generator=draw)
        self.model, self.pieces = nn.Linear(8, 4), 1

    @property
    def exam_id(self):
        return exam_id_of({"questions": 64})

    def smaller(self):
        self.pieces *= 2
        return self.pieces <= 2

    def examine(self, request, run, against):
        reader = Reader(Path(run) / request.weights)
        mood = Path(run) / "mood"
        word, _, number = mood.read_text().partition(" ") if mood.exists() else ("well", "", "")
        if word == "once":
            mood.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "die" and request.step == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "half":  # dead when all but the result is there
            os.link = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
        if word == "slow":
            time.sleep(float(number))
        if word == "raise":
            raise KeyError("no such thing")
        if word == "memory":
            if self.pieces == 1 or number == "always":
                resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.RLIM_INFINITY))
                torch.empty(2**32)
        losses = []
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(reader.tensor("weights", name))
            for x, y in zip(self.x.chunk(self.pieces), self.y.chunk(self.pieces)):
                losses.append(nn.functional.cross_entropy(self.model(x), y, reduction="none"))
        losses = torch.cat(losses).double()
        metrics = {"threads": float(torch.get_num_threads()), "nice": float(os.nice(0)),
                   "cores": float(len(os.sched_getaffinity(0))), "pieces": float(self.pieces)}
        if word == "odd":
            metrics = {"own": math.nan, "text": "good", "right": 0.5}
        loss = math.nan if word == "nan" else losses.mean().item()
        items = SampleLosses(losses.numpy(), torch.ones(64).double().numpy())
        samples = torch.tensor(64) if word == "tensor" else 64
        print("noise that must not be taken for a word to the parent")
        result = EvaluationResult(request.step, request.exam_id, request.attempt, "done", loss=loss,
                                  metrics=metrics, samples=samples, total=64, seconds=0.1)
        return Findings(result, items)


def make(run):
    return Own(run)
'''
EXAM = exam_id_of({"questions": 64})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`module:function` of it, found on our path and so on the child's."""
    (tmp_path / "own_exam.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_exam:make"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "evals").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def start(run: Path, own: str, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., EvaluatorProcess]]:
    """start(...): an evaluator beside us, killed when the test is over."""
    monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.FIRST_RESTART", 0.1)
    with ExitStack() as started:

        def begin(*, restarts: int = 3, oldest: bool = False, threads: int = 1) -> EvaluatorProcess:
            monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.RESTARTS", restarts)
            made = EvaluatorProcess(run, "cpu", build=own, oldest=oldest, threads=threads)
            started.callback(made.close)
            return made

        yield begin


def weights(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(4, 8, generator=draw), "bias": torch.randn(4, generator=draw)}


def publish_snapshot(run: Path, step: int, attempt: int = 1) -> None:
    groups = {"weights": {name: part_of(tensor) for name, tensor in weights(step).items()}}
    made = Checkpointer(run, run_id="f00d", kind="snapshot")
    made.save(Save(step, attempt, groups, {"position": step}, {"data": "d"}, {"template": "glm4"}))
    (outcome,) = made.close(10)
    assert outcome.error is None, outcome


def ask(run: Path, step: int, attempt: int = 1, exam_id: str = EXAM) -> Request:
    if not (run / "snapshots" / f"snapshot-{step}").exists():
        publish_snapshot(run, step, attempt)
    request = Request(step, exam_id, attempt, f"snapshots/snapshot-{step}")
    ledger.post(run, request)
    return request


def until(
    done: Callable[[], bool], beside: EvaluatorProcess | None = None, seconds: float = 100
) -> list[str]:
    """Steps of a trainer that looks at its evaluator between them; what it heard."""
    ends, heard = time.monotonic() + seconds, list[str]()
    while not done():
        assert time.monotonic() < ends, heard
        heard += beside.poll() if beside is not None else []
        time.sleep(0.01)
    return heard


def answered(run: Path, *requests: Request) -> Callable[[], bool]:
    return lambda: all(ledger.read(run, request.stem) is not None for request in requests)


def result_of(run: Path, request: Request) -> EvaluationResult:
    found = ledger.read(run, request.stem)
    assert found is not None
    return found


def expected(step: int) -> float:
    """The same loss, computed here."""
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(64, 8, generator=draw), torch.randint(4, (64,), generator=draw)
    said = weights(step)
    logits = torch.nn.functional.linear(x, said["weight"], said["bias"])
    return torch.nn.functional.cross_entropy(logits, y, reduction="none").double().mean().item()


def says(run: Path, mood: str) -> None:
    """Whole or not at all: an evaluator may be reading it."""
    (run / "mood.new").write_text(mood)
    (run / "mood.new").rename(run / "mood")


def pid_of(run: Path, beside: EvaluatorProcess) -> int:
    """Of the child that is there now."""
    process = beside._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    return process.pid


def test_beside(run: Path, start: Callable[..., EvaluatorProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds is right; it is nice, keeps to its share, and leaves our surroundings alone (G11)."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    surroundings = torch.get_rng_state(), torch.get_num_threads(), os.nice(0), os.sched_getaffinity(0)
    first, second = ask(run, 3), ask(run, 6)
    beside = start(threads=2)
    assert beside.poll() == []
    assert not beside.ready
    assert until(answered(run, first, second), beside) == []
    until(lambda: beside.ready, beside)
    (three, six) = ledger.results(run)
    assert math.isclose(three.loss or 0.0, expected(3), rel_tol=1e-6)
    assert math.isclose(six.loss or 0.0, expected(6), rel_tol=1e-6)
    assert (six.metrics["threads"], three.metrics["threads"]) == (2.0, 1.0)  # 6 comes first, 3 alone
    assert three.metrics["nice"] == min(19, os.nice(0) + 10)
    assert int(three.by["process"]) == pid_of(run, beside)
    items = ledger.read_sample_losses(run, first.stem)
    assert items is not None
    assert items.losses_N.sum() / 64 == three.loss
    assert "noise" in (run / "evals" / "evaluator.log").read_text()
    child = pid_of(run, beside)
    beside.close()
    assert beside.given_up
    assert beside.poll() == []
    assert not Path(f"/proc/{child}").exists()
    assert torch.equal(torch.get_rng_state(), surroundings[0])
    assert (torch.get_num_threads(), os.nice(0), os.sched_getaffinity(0)) == surroundings[1:]


def test_killed_at_any_moment(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G1: before it is ready, amid an evaluation, and after a result; each step has its one result."""
    beside = start()
    os.kill(pid_of(run, beside), signal.SIGKILL)
    says(run, "once")
    first = ask(run, 3)
    heard = until(answered(run, first), beside)
    assert [said for said in heard if "signal 9" in said] == [
        f for f in heard if f.startswith("the evaluator ended")
    ]
    assert len(heard) == 4, heard  # twice ended, twice started again
    os.kill(pid_of(run, beside), signal.SIGKILL)
    second = ask(run, 6)
    until(answered(run, second), beside)
    assert [(said.step, said.status) for said in ledger.results(run)] == [(3, "done"), (6, "done")]
    assert not ledger.is_claimed(run, first)


def test_one_that_always_ends_is_given_up(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G1: dead each time when all but the result's name is there. The next evaluator answers whole."""
    request = ask(run, 3)
    says(run, "half")
    beside = start(restarts=0)
    heard = until(lambda: beside.given_up, beside)
    assert heard[-1] == "the evaluator is given up"
    assert sum("signal 9" in said for said in heard) == 1
    assert ledger.read(run, request.stem) is None
    assert ledger.waiting(run) == [request]
    assert any(path.name.endswith(".items.json") for path in (run / "evals").iterdir())
    (run / "mood").unlink()
    until(answered(run, request), start())
    ledger.sweep(run)
    assert sorted(path.name for path in (run / "evals").iterdir()) == [
        f"{request.stem}.items.json",
        f"{request.stem}.json",
        "evaluator.log",
    ]


def test_an_evaluation_that_always_ends_it_is_let_be(
    run: Path, start: Callable[..., EvaluatorProcess]
) -> None:
    """G7: as when the system kills it for its memory. The others are evaluated."""
    says(run, "die 3")
    heavy, other, beside = ask(run, 3), ask(run, 6), start(oldest=True)
    heard = until(answered(run, heavy, other), beside)
    assert not beside.given_up
    assert result_of(run, other).status == "done"
    assert (result_of(run, heavy).status, result_of(run, heavy).reason) == (
        "failed",
        "the evaluator ended 2 times while at it (signal 9)",
    )
    assert any(said.startswith("step 3 is not evaluated") for said in heard)


def test_hanging(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G2: stopped amid an evaluation. The trainer gives the step up, kills it, and the next is evaluated."""
    says(run, "slow 1")
    first, beside = ask(run, 3), start()
    until(lambda: ledger.is_claimed(run, first), beside)
    stopped = pid_of(run, beside)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert beside.poll() == []
    assert time.monotonic() - began < 5  # it does not wait for one that is stopped
    assert ledger.is_claimed(run, first)
    said = beside.kill("no result in 1 s")
    assert ledger.withdraw(run, first, "timeout", "no result in 1 s")
    assert "no result in 1 s" in said[0]
    assert not Path(f"/proc/{stopped}").exists()
    second = ask(run, 6)
    until(answered(run, second), beside)
    assert [(one.step, one.status) for one in ledger.results(run)] == [(3, "timeout"), (6, "done")]


def hangs(beside: EvaluatorProcess, limit: float) -> list[str]:
    """What is heard when something waits so long for one that takes nothing."""
    ends, heard = time.monotonic() + 60, list[str]()
    while not heard and time.monotonic() < ends:
        heard = beside.end_if_idle(limit)
        time.sleep(0.05)
    return heard


def test_hanging_between_two_evaluations(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G2: it lives, and takes nothing of what waits. It is ended, and no evaluation is blamed."""
    publish_snapshot(run, 6)
    first, beside = ask(run, 3), start()
    until(answered(run, first), beside)
    until(lambda: not ledger.is_claimed(run, first), beside)
    hung = pid_of(run, beside)
    os.kill(hung, signal.SIGSTOP)
    time.sleep(1)
    assert beside.end_if_idle(None) == []
    second = ask(run, 6)
    assert beside.end_if_idle(0.5) == []  # which has not waited so long
    (said,) = hangs(beside, 0.5)
    assert said.startswith("the evaluator ended (it has claimed nothing for 0.5 s): ")
    assert not _lives(hung)
    assert until(answered(run, second), beside) == ["the evaluator is started again"]
    assert {one.step: one.by["process"] == str(hung) for one in ledger.results(run)} == {3: True, 6: False}


def test_hanging_before_the_first_evaluation(
    run: Path, start: Callable[..., EvaluatorProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2: reading a model may take longer than an evaluation, but not for ever."""
    request, beside = ask(run, 3), start()
    os.kill(pid_of(run, beside), signal.SIGSTOP)
    time.sleep(0.5)
    assert beside.end_if_idle(0.1) == []
    monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.STARTING", 0.2)
    assert "claimed nothing for 0.2 s" in hangs(beside, 0.1)[0]
    until(answered(run, request), beside)
    assert result_of(run, request).status == "done"


class Stopping:
    """Stops the run's evaluator when it has answered once, before it is asked again."""

    def __init__(self, run: Path) -> None:
        self.run, self.stopped = run, 0

    def observe(self, event: Mapping[str, object]) -> None:
        if event["kind"] != "step" or self.stopped:
            return
        ends = time.monotonic() + 1.0
        while not self._asked() and time.monotonic() < ends:
            time.sleep(0.05)
        while self._asked() and not self.stopped:
            found = ledger.results(self.run)
            if found and not list((self.run / "evals").glob("*.claim")):
                self.stopped = int(found[0].by["process"])
                os.kill(self.stopped, signal.SIGSTOP)
            time.sleep(0.05)

    def _asked(self) -> bool:
        return bool(ledger.waiting(self.run) or ledger.results(self.run))

    def close(self) -> None:
        pass


def test_a_trainer_starts_one_that_hangs_anew(
    tiny_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2: where results decide, too; else each of them would be waited for in vain."""
    monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.FIRST_RESTART", 0.1)
    evaluate = {
        "metrics": ["loss"], "every": 6, "samples": "all", "where": "beside",
        "stop_after": 9, "lag": 4, "timeout": 3.0, "patience": 20.0,
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**tiny_run, "evaluate": evaluate}))
    stopping = Stopping(tmp_path / "run")
    result = train(load_config(tmp_path / "config.yaml"), tmp_path / "run", observers=[stopping])
    assert (result.step, result.done) == (14, True)
    assert stopping.stopped
    found = {one.step: one for one in ledger.results(tmp_path / "run")}
    assert found[0].by["process"] == str(stopping.stopped)
    for step in (12, 14):
        assert found[step].status == "done"
        assert found[step].by["process"] != str(stopping.stopped)
    events = read_events(tmp_path / "run" / "events.jsonl")
    said = [str(event["said"]) for event in events if event["kind"] == "warning"]
    assert sum("it has claimed nothing for 3 s" in sentence for sentence in said) == 1


def test_a_disk_that_is_full_for_a_while(
    run: Path,
    mount: Callable[..., Path],
    start: Callable[..., EvaluatorProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer waits until it can be written, and a request until it can be claimed: nothing is lost."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what the examiner prints would not fit either
    mount(run, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    (run / "evals").mkdir()
    says(run, "slow 1")
    publish_snapshot(run, 9)
    first, second, beside = ask(run, 3), ask(run, 6), start(oldest=True)
    child = pid_of(run, beside)
    until(lambda: ledger.is_claimed(run, first), beside)
    _fill(run)
    ends = time.monotonic() + 2
    assert until(lambda: time.monotonic() > ends, beside) == []
    assert ledger.is_claimed(run, first)
    (run / "filler").unlink()
    assert until(answered(run, first, second), beside) == []
    third = ask(run, 9)
    _fill(run)
    ends = time.monotonic() + 1.2
    assert until(lambda: time.monotonic() > ends, beside) == []
    (run / "filler").unlink()
    assert until(answered(run, third), beside) == []
    found = ledger.results(run)
    assert [(one.status, one.reason, one.by["process"]) for one in found] == [("done", None, str(child))] * 3


def _fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def test_only_what_it_is_at_itself_is_its_fault(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G2: somebody else is late. Our evaluator, healthy and at another step, or at none, is let be."""
    says(run, "slow 600")
    ours, beside = ask(run, 3), start()
    until(lambda: ledger.is_claimed(run, ours), beside)
    theirs = ask(run, 6)
    with ledger.claim(run, theirs) as external:
        assert external
        child = pid_of(run, beside)
        assert beside.kill("no result in 1 s", theirs.stem) == []
        assert pid_of(run, beside) == child
        assert _lives(child)
    heard: list[str] = []
    ends = time.monotonic() + 60
    while not heard and time.monotonic() < ends:
        heard = beside.kill("no result in 1 s", ours.stem)  # once it has said that it is at it
    assert "no result in 1 s" in heard[0]
    assert not _lives(child)


def test_one_that_does_not_go_when_it_is_killed(
    run: Path, start: Callable[..., EvaluatorProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call to a disk that is lost: SIGKILL waits there. Training does not, and starts another."""
    says(run, "slow 600")
    request, beside = ask(run, 3), start()
    until(lambda: ledger.is_claimed(run, request), beside)
    child, real = pid_of(run, beside), os.killpg
    os.kill(child, signal.SIGSTOP)
    monkeypatch.setattr(os, "killpg", lambda *_: None)  # no signal of ours reaches it
    try:
        killer = threading.Thread(target=beside.kill, args=("no result in 1 s",), daemon=True)
        killer.start()
        killer.join(60)
        assert not killer.is_alive()
        assert _lives(child)
    finally:
        monkeypatch.setattr(os, "killpg", real)
        os.kill(child, signal.SIGKILL)
    says(run, "well")
    until(answered(run, request), beside)
    assert pid_of(run, beside) != child


def test_what_the_system_refuses_is_an_end_and_not_ours(
    run: Path, start: Callable[..., EvaluatorProcess]
) -> None:
    """No process, no room for its log: as a directory in the log's place refuses to be opened."""
    beside, log = start(restarts=2), run / "evals" / "evaluator.log"
    until(lambda: beside.ready, beside)
    os.kill(pid_of(run, beside), signal.SIGKILL)
    log.unlink()
    log.mkdir()
    heard = until(lambda: beside.given_up, beside)
    assert "signal 9" in heard[0]
    assert "its log cannot be read: [Errno 21]" in heard[0]
    assert [said for said in heard[1:-1] if "it could not be started: [Errno 21]" in said] == heard[1:-1]
    assert len(heard) == 4
    assert heard[-1] == "the evaluator is given up"
    with pytest.raises(UserError, match=r"no evaluator can be started beside training: \[Errno 21\]"):
        start()


def test_slow(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G3: what waits gives way to what is newer, and that is on record; what is claimed is let be."""
    says(run, "slow 1")
    requests, beside = [ask(run, 3)], start()
    until(lambda: ledger.is_claimed(run, requests[0]), beside)
    for step in (6, 9, 12):
        requests.append(ask(run, step))
        for older in requests[:-1]:
            with ledger.claim(run, older) as mine:
                if mine:
                    ledger.withdraw(run, older, "skipped", f"step {step} is newer")
    until(answered(run, *requests), beside)
    status = {said.step: said.status for said in ledger.results(run)}
    assert status == {3: "done", 6: "skipped", 9: "skipped", 12: "done"}
    assert result_of(run, requests[1]).reason == "step 9 is newer"


def test_two_evaluators(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G4, G12: from both ends of a backlog. Each step has one result, in the order of steps."""
    says(run, "slow 0.3")
    requests = [ask(run, step) for step in range(1, 9)]
    evaluators = [start(), start(oldest=True)]
    until(answered(run, *requests))
    found = ledger.results(run)
    assert [said.step for said in found] == list(range(1, 9))
    assert {int(said.by["process"]) for said in found} == {pid_of(run, one) for one in evaluators}
    assert all(math.isclose(said.loss or 0.0, expected(said.step), rel_tol=1e-6) for said in found)
    when = [(run / "evals" / f"{request.stem}.json").stat().st_mtime_ns for request in requests]
    assert when != sorted(when)
    until(lambda: not list((run / "evals").glob("*.claim")), seconds=60)


def test_one_that_goes_wrong_costs_itself_alone(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G7, G8, G10: memory, numbers, bugs and another version: a result each, and the process lives on."""
    beside, step = start(), 0

    def one(mood: str, exam_id: str = EXAM) -> EvaluationResult:
        nonlocal step
        step += 1
        says(run, mood)
        request = ask(run, step, exam_id=exam_id)
        until(answered(run, request), beside)
        return result_of(run, request)

    assert one("well").metrics["pieces"] == 1
    child = pid_of(run, beside)
    halved = one("memory")
    assert (halved.status, halved.metrics["pieces"]) == ("done", 2)
    assert math.isclose(halved.loss or 0.0, expected(2), rel_tol=1e-6)
    full = one("memory always")
    assert full.status == "failed"
    assert (full.reason or "").startswith("out of memory: ")
    nan = one("nan")
    assert (nan.status, nan.loss, nan.reason) == ("failed", None, "the held-out loss is nan")
    odd = one("odd")
    assert (odd.status, odd.metrics, odd.reason) == (
        "done",
        {"right": 0.5},
        "left out, as no finite numbers: own, text",
    )
    assert odd.loss is not None
    assert one("tensor").status == "failed"
    bug = one("raise")
    assert (bug.status, bug.reason) == ("failed", "KeyError: 'no such thing'")
    other = one("well", exam_id="00000000")
    assert other.status == "failed"
    assert "00000000" in (other.reason or "")
    assert EXAM in (other.reason or "")
    assert one("well").status == "done"
    assert pid_of(run, beside) == child
    assert "KeyError" in (run / "evals" / "evaluator.log").read_text()
    for path in (run / "evals").glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_a_snapshot_is_held_while_it_is_read(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G5, G6: it cannot be deleted amid an evaluation; one that is gone fails; the end is heard."""
    says(run, "slow 1")
    first, gone = ask(run, 3), ask(run, 1)
    drop(run / gone.weights)
    beside = start()
    until(lambda: ledger.is_claimed(run, first), beside)
    assert not drop(run / first.weights)
    (run / "events.jsonl").write_text('{"kind": "stop", "reason": "done", "step": 3}\n')
    child = pid_of(run, beside)
    until(answered(run, first, gone))
    assert result_of(run, first).status == "done"
    assert result_of(run, gone).status == "failed"
    assert "snapshot-1" in (result_of(run, gone).reason or "")
    assert drop(run / first.weights)
    until(lambda: not _lives(child))
    assert ledger.waiting(run) == []


def test_a_late_result_is_dropped(run: Path, start: Callable[..., EvaluatorProcess]) -> None:
    """G6, G13: the trainer has given a step up, or gone back and made it anew, while it was evaluated."""
    publish_snapshot(run, 9)
    says(run, "slow 1")
    late, beside = ask(run, 3), start()
    until(lambda: ledger.is_claimed(run, late), beside)
    ledger.withdraw(run, late, "timeout", "no result in 1 s")
    given_up = ask(run, 9)
    until(lambda: ledger.is_claimed(run, given_up), beside)
    assert "snapshot-9" in ledger.abandon_after(run, 6, attempt=2)
    says(run, "well")
    anew = ask(run, 9, attempt=2)
    until(answered(run, anew), beside)
    assert [(said.step, said.attempt, said.status) for said in ledger.results(run)] == [
        (3, 1, "timeout"),
        (9, 2, "done"),
    ]
    assert not list((run / "evals").glob(f"{given_up.stem}*"))
    assert not list((run / "evals").glob("3-*.items.json"))


def test_half_a_snapshot_is_never_seen(run: Path) -> None:
    """G9: whatever has a snapshot's name opens and verifies, at any moment of many publications."""
    (run / "snapshots").mkdir()
    seen, over, wrong = set[int](), threading.Event(), list[str]()

    def watch() -> None:
        while not over.is_set():
            for name in os.listdir(run / "snapshots"):
                if (step := step_of(name, "snapshot")) is not None and step not in seen:
                    seen.add(step)
                    wrong.extend(f"{name}: {said}" for said in audit(run / "snapshots" / name).damaged)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(40):
        publish_snapshot(run, step)
    over.set()
    watcher.join()
    assert wrong == []
    assert len(seen) > 10


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from glm_accelerate.evaluate.protocol.child import EvaluatorProcess
beside = EvaluatorProcess(Path(sys.argv[1]), "cpu", build="own_exam:make")
print(beside._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_its_trainer(
    run: Path, own: str, stopped: bool, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    """However that ends, and even if the evaluator is stopped then."""
    says(run, "slow 600")
    request = ask(run, 3)
    command = [sys.executable, "-c", PARENT, str(run), str(run.parent)]
    parent = spawn(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until(lambda: ledger.is_claimed(run, request))
    if stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    until(lambda: not _lives(child), seconds=60)
    until(lambda: not ledger.is_claimed(run, request), seconds=60)  # its threads end a moment after it
    assert ledger.waiting(run) == [request]


def test_by_hand(run: Path, own: str, warm: Callable[..., Warm]) -> None:
    """A signal frees what was claimed and says so with 75; once is once; a mistake is the user's with 2."""
    words = ("evaluate", "--follow", str(run), "--build")
    says(run, "slow 600")
    request = ask(run, 3)
    process = warm(*words, own)
    until(lambda: ledger.is_claimed(run, request))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    assert not ledger.is_claimed(run, request)
    says(run, "well")
    assert warm(*words, own, "--once").wait(120) == 0
    assert result_of(run, request).status == "done"
    odd = warm(*words, "own_exam:nothing").done()
    assert (odd.returncode, odd.stderr.count("\n")) == (2, 1)
    assert "own_exam:nothing" in odd.stderr


@pytest.mark.parametrize(("said", "order"), [("{}", [9, 6, 3]), ("{keep: all}", [3, 6, 9])])
def test_by_hand_in_the_order_that_the_run_needs(
    run: Path, own: str, said: str, order: list[int], warm: Callable[..., Warm]
) -> None:
    (run / "config.yaml").write_text(f"model: {{path: m}}\ndata: {{train: a, dev: b}}\nevaluate: {said}\n")
    requests = [ask(run, step) for step in (3, 6, 9)]
    assert warm("evaluate", "--follow", str(run), "--build", own, "--once").wait(120) == 0
    when = {request.step: (run / "evals" / f"{request.stem}.json").stat().st_mtime_ns for request in requests}
    assert sorted(when, key=when.__getitem__) == order


def test_what_a_person_has_to_mend_is_not_tried_again(run: Path, own: str) -> None:
    beside = EvaluatorProcess(run, "cpu", build="own_exam:nothing")
    heard = until(lambda: beside.given_up, beside)
    assert "own_exam:nothing" in heard[0]
    assert heard[-1] == "the evaluator is given up"


def test_a_glm(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    """The run's own model and exam, made again from its files: what the trainer found itself."""
    own = {"every": 2, "where": "inline"}
    said = {**tiny_run, "train": {"steps": 2, "step_samples": 4}, "evaluate": {**tiny_run["evaluate"], **own}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(said))
    run = tmp_path / "run"
    train(load_config(tmp_path / "config.yaml"), run)
    (inline,) = [said for said in ledger.results(run) if said.step == 2]
    request = Request(2, inline.exam_id, 9, "checkpoints/checkpoint-2", against=f"0-{inline.exam_id}-1")
    ledger.post(run, request)
    beside = EvaluatorProcess(run, "cpu")
    try:
        until(answered(run, request), beside)
    finally:
        beside.close()
    found = result_of(run, request)
    assert found.status == "done", found.reason
    assert found.loss == inline.loss
    assert found.metrics == inline.metrics
    assert found.against is not None
    assert found.against == inline.against
    assert (run / "evals" / f"{request.stem}.predictions.jsonl").read_text() == (
        run / "evals" / f"{inline.stem}.predictions.jsonl"
    ).read_text()


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
