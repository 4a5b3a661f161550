"""Several real processes over gloo: the same run as one process, through crashes, stops and other numbers."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.heartbeat import QUIET, signs
from glm_accelerate.watch.run import WatchedRun
from tests.checkpoints import latest
from tests.processes import children_of
from tests.warm import UNMEASURED_COMMAND, Warm

Said = dict[str, Any]
STEPS = 20


@pytest.fixture
def config(tiny_run: Said, tmp_path: Path) -> Path:
    """No dropout, whose masks each rank draws for itself, and float32, in which sums can be compared."""
    said = {
        **tiny_run,
        "adapt": {"method": "full"},
        "train": {"steps": STEPS, "step_samples": 4},
        "optim": {"learning_rate": 1e-3},
        # As `auto` says of few steps: runs without end compile nothing and start no evaluator.
        "precision": {"compute": "float32", "compile": "off"},
        "evaluate": {"every": 10, "where": "inline"},
        "checkpoint": {"every": 5, "wait": True},
    }
    path = tmp_path / "ranks.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


def command(config: Path, run: Path, ranks: int, *more: str) -> list[str]:
    return ["train", str(config), "--run", str(run), "--nproc", str(ranks), *more]


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


def state(run: Path) -> dict[str, torch.Tensor]:
    found, _ = latest(run)
    assert found is not None
    reader = Reader(found)
    return {
        f"{group}/{name}": t for group in ("weights", "optimizer") for name, t in reader.group(group).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


Whole = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Whole]:
    """By method: figures and state of one process's run, once a test has made it."""
    return {}


@pytest.mark.parametrize(
    ("method", "ranks", "layout"),
    [
        ("full", 3, "shard=full"),
        ("full", 4, "shard=2"),
        ("lora", 2, "shard=off"),
        ("full", 4, "tensor=4"),
        ("lora", 4, "tensor=2 parallel.shard=full"),
        ("full", 4, "pipeline=2 parallel.shard=full"),
        ("lora", 2, "pipeline=2"),
        ("freeze", 2, "pipeline=2"),
        ("prefix", 4, "tensor=2 parallel.pipeline=2"),
        ("lora", 4, "tensor=2 parallel.pipeline=2 memory.offload=[activations,weights]"),
        pytest.param("full", 2, "shard=full", marks=pytest.mark.prove),
        pytest.param("lora", 3, "shard=full", marks=pytest.mark.prove),
        pytest.param("lora", 2, "tensor=2", marks=pytest.mark.prove),
    ],
)
def test_n_ranks_learn_what_one_learns(
    method: str,
    ranks: int,
    layout: str,
    config: Path,
    tmp_path: Path,
    alone: dict[str, Whole],
    go: Callable[..., str],
) -> None:
    more = [f"adapt.method={method}", "adapt.dropout=0.0", "adapt.layers=1"]
    if method not in alone:
        go(config, tmp_path / "one", 1, *more)
        alone[method] = figures(tmp_path / "one"), state(tmp_path / "one")
    go(config, tmp_path / "many", ranks, *more, *f"parallel.{layout}".split())
    (one, weights), many = alone[method], figures(tmp_path / "many")
    assert len(one) == len(many) == STEPS
    for (loss, norm), (its_loss, its_norm) in zip(one, many, strict=True):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-5 if method == "full" else 1e-4)
    its_weights = state(tmp_path / "many")
    assert weights.keys() == its_weights.keys()
    # Where a gradient is near zero, Adam divides rounding by rounding and a weight may move by a whole rate
    # (1e-3): few do. With a larger epsilon, below which gradients count as zero, all agree to 2e-6.
    moved = torch.cat([(weights[n] - its_weights[n]).abs().flatten() for n in weights if n[0] == "w"])
    assert float(moved.max()) < 1e-3
    assert float(moved.quantile(0.99)) < 1e-5
    # Sums were taken in another order: something was divided. Stages alone change no order of sums.
    assert (float(moved.max()) > 0.0) == (layout != "pipeline=2")


def test_the_weights_differ_by_what_adam_makes_of_rounding(
    config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    for ranks in (1, 3):
        go(config, tmp_path / str(ranks), ranks, "optim.epsilon=1e-3")
    one, three = state(tmp_path / "1"), state(tmp_path / "3")
    assert max(float((one[name] - three[name]).abs().max()) for name in one if name[0] == "w") < 2e-6


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, ["parallel.shard=full"]), (4, ["parallel.tensor=2", "parallel.pipeline=2"])]
)
def test_a_killed_rank_costs_no_more_than_an_interval(
    ranks: int,
    layout: list[str],
    config: Path,
    tmp_path: Path,
    warm: Callable[..., Warm],
    go: Callable[..., str],
) -> None:
    """With dropout, one rank killed: the job goes on by itself and ends bit-identical."""
    more = ["adapt.method=lora", "adapt.dropout=0.2", "train.steps=25", *layout]
    go(config, tmp_path / "whole", ranks, *more)
    run = tmp_path / "killed"
    job = warm(*command(config, run, ranks, *more))
    while job.poll() is None and steps_done(run) < 12:
        time.sleep(0.01)
    os.kill(processes(job.pid)[1], signal.SIGKILL)
    said = "".join(job.communicate(timeout=120))
    assert job.returncode == 0, said
    assert len(re.findall(r"launcher: rank \d \(process \d+\) ended by SIGKILL", said)) == 1
    assert "this is a bug" not in said
    assert same(state(tmp_path / "whole"), state(run))
    assert figures(tmp_path / "whole") == figures(run)
    resumed = [event["step"] for event in read_events(run / "events.jsonl") if event["kind"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0] >= 5


@pytest.mark.parametrize("words", [["--resume", "never"], ["--resume", "15"]])
def test_a_job_started_again_keeps_what_it_did(
    words: list[str],
    config: Path,
    tmp_path: Path,
    warm: Callable[..., Warm],
    go: Callable[..., str],
) -> None:
    """What the words say of the beginning was done by the first attempt: a crash does not do it again."""
    run = tmp_path / "run"
    go(config, run, 1)
    more = ["train.steps=100", "--accept-changes", *words]
    job = warm(*command(config, run, 2, *more))
    while job.poll() is None and not 30 <= saved(run) < 90:
        time.sleep(0.01)
    os.kill(processes(job.pid)[1], signal.SIGKILL)
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 0, said
    events = read_events(run / "events.jsonl")
    begun = [event["step"] for event in events if event["kind"] in ("start", "resume")]
    assert begun[1] == (0 if "never" in words else 15)
    assert begun[2] >= 25


def test_saved_at_three_gone_on_with_by_two_stages_that_share_products_and_by_one(
    config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    run = tmp_path / "parts"
    go(config, run, 3, "train.steps=10", "optim.schedule=constant")
    divided = ("parallel.tensor=2", "parallel.pipeline=2", "--accept-changes")
    go(config, run, 4, "train.steps=15", "optim.schedule=constant", *divided)
    said = go(config, run, 1, "train.steps=20", "optim.schedule=constant", "--accept-changes")
    assert "ranks was 4, now 1" in " ".join(said.split())
    go(config, tmp_path / "constant", 1, "optim.schedule=constant")
    for one, other in zip(figures(tmp_path / "constant"), figures(run), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_open_sizes_stay_what_they_were_when_the_run_began(
    config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    every = [f"parallel.{axis}=auto" for axis in ("tensor", "pipeline", "context")]

    def sizes(run: Path) -> list[object]:
        plan = json.loads((run / "plan.json").read_text())
        return [plan[axis] for axis in ("tensor", "query", "stages", "context", "shards", "micro_tokens")]

    assert "auto: of " in go(config, tmp_path / "open", 2, *every, "train.steps=2")
    other = "parallel.tensor=2" if sizes(tmp_path / "open")[0] == 1 else "parallel.pipeline=2"
    run = tmp_path / "given"
    go(config, run, 2, other, "train.steps=2")
    begun = sizes(run)
    go(config, run, 2, *every, "train.steps=4", "--accept-changes")
    assert sizes(run) == begun != sizes(tmp_path / "open")


def test_a_stopped_rank_is_named_in_seconds(config: Path, tmp_path: Path, warm: Callable[..., Warm]) -> None:
    run = tmp_path / "run"
    job = warm(*command(config, run, 2, "train.steps=100000"))
    try:
        while steps_done(run) < 3:
            time.sleep(0.02)
        time.sleep(2.5)  # so that its last sign of life is from training
        process = processes(job.pid)[1]
        os.kill(process, signal.SIGSTOP)
        began = time.monotonic()
        line = job.read_until("is silent")
        assert f"rank 1, process {process}, is silent" in line
        assert "(it is stopped)" in line
        assert re.search(r"step \d+, (training|saving|evaluating)", line)
        assert time.monotonic() - began < 20
        assert seen(run, lambda states: states[1] == "stopped") == ["alive", "stopped"]
        os.kill(process, signal.SIGCONT)
        assert seen(run, lambda states: states[1] == "alive") == ["alive", "alive"]
        reached = steps_done(run)
        while steps_done(run) < reached + 3:  # nobody was killed, and the job goes on
            assert job.poll() is None
            time.sleep(0.02)
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=120)
    assert job.returncode == 75
    assert seen(run, lambda states: True) == ["ended", "ended"]


def test_a_stopped_first_rank_is_told_of_by_the_next(
    config: Path, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    run = tmp_path / "run"
    job = warm(*command(config, run, 2, "train.steps=100000"))
    try:
        while steps_done(run) < 3:
            time.sleep(0.02)
        process = processes(job.pid)[0]
        os.kill(process, signal.SIGSTOP)
        assert seen(run, lambda states: states[0] == "stopped") == ["stopped", "alive"]
        (node,) = WatchedRun(run, "run").nodes()
        assert node["ranks"][0]["process"] == process
        assert node["ranks"][0]["seconds"] >= QUIET > node["ranks"][1]["seconds"] - node["age"]
        os.kill(process, signal.SIGCONT)
        assert seen(run, lambda states: states[0] == "alive") == ["alive", "alive"]
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=120)
    assert job.returncode == 75


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),  # as to the first process of a container
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.prove),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.prove),
        (signal.SIGHUP, True),  # as a terminal that closes
        (signal.SIGUSR1, True),  # as Slurm with --signal=USR1
    ],
)
def test_signals_end_all_ranks_with_everything_saved(
    number: signal.Signals,
    whole_group: bool,
    config: Path,
    tmp_path: Path,
    warm: Callable[..., Warm],
) -> None:
    run = tmp_path / "run"
    job = warm(*command(config, run, 2, "train.steps=100000"), group=True)
    while job.poll() is None and steps_done(run) < 3:
        time.sleep(0.02)
    if whole_group:
        os.killpg(job.pid, number)
    else:
        job.send_signal(number)
    said = "".join(job.communicate(timeout=120))
    assert job.returncode == 75, said
    assert "run the same command again" in said
    assert published(run)[0].name == f"checkpoint-{steps_done(run)}"


@pytest.mark.parametrize("when", ["starting", "training"])
def test_ranks_end_with_their_launcher(
    when: str, config: Path, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """Killed, it can tell nobody; ranks that stayed would hold their memory for ever."""
    run = tmp_path / "run"
    job = warm(*command(config, run, 2, "train.steps=100000"))
    while len(ranks := processes(job.pid)) < 2 or (when == "training" and steps_done(run) < 3):
        assert job.poll() is None
        time.sleep(0.02)
    job.kill()
    job.wait()
    while any(alive(process) for process in ranks.values()):  # the suite's time limit is the test
        time.sleep(0.05)
    assert "this is a bug" not in job.err.read_text()
    assert when == "starting" or published(run)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_training_goes_on_when_nobody_reads_what_it_prints(
    ranks: int, config: Path, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    run = tmp_path / "run"
    line = [*UNMEASURED_COMMAND, *command(config, run, ranks, "train.steps=100000")]
    job = spawn(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    while steps_done(run) < 3:
        assert job.poll() is None
        time.sleep(0.02)
    job.stdout.close()
    reached = steps_done(run)
    while steps_done(run) < reached + 20:
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGHUP)
    assert job.wait(timeout=120) == 75
    assert published(run)[0].name == f"checkpoint-{steps_done(run)}"
    attempts = {event["attempt"] for event in read_events(run / "events.jsonl")}
    assert attempts == {1}


def test_a_run_that_is_moved_while_it_trains_ends_by_name(
    config: Path, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """Its checkpoints would be in one place, and its log in another."""
    run = tmp_path / "run"
    job = warm(*command(config, run, 1, "train.steps=100000"))
    while saved(run) < 5:
        assert job.poll() is None
        time.sleep(0.02)
    run.rename(tmp_path / "moved")
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 2, said
    assert f"error: {run}: this run's directory was moved or replaced while it trained" in said
    assert not (run / "events.jsonl").exists()


def test_adafactor_needs_whole_weights(
    config: Path, tmp_path: Path, warm: Callable[..., Warm], go: Callable[..., str]
) -> None:
    run, more = tmp_path / "run", ["optim.name=adafactor", "adapt.method=lora"]
    refused = warm(*command(config, run, 2, *more, "parallel.shard=full")).done()
    assert refused.returncode == 2
    assert "optim.name=adafactor cannot go with parallel.shard" in refused.stderr
    go(config, run, 2, *more, "train.steps=5", "parallel.shard=off", "optim.schedule=constant")
    go(config, run, 2, *more, "parallel.shard=off", "optim.schedule=constant", "--accept-changes")
    assert len(figures(run)) == STEPS


def test_a_mistake_is_said_once(config: Path, tmp_path: Path, warm: Callable[..., Warm]) -> None:
    answer = warm(*command(config, tmp_path / "run", 2, f"data.train={tmp_path}/nowhere.jsonl")).done()
    assert answer.returncode == 2
    assert len(re.findall("nowhere.jsonl", answer.stderr.replace("\n", ""))) == 1


def test_a_job_that_gets_nowhere_is_given_up(config: Path, tmp_path: Path, warm: Callable[..., Warm]) -> None:
    """A rank that dies each time before the first checkpoint: three attempts, then the launcher says so."""
    more = ["train.steps=100000", "checkpoint.every=50000"]
    job = warm(*command(config, tmp_path / "run", 2, *more))
    killed: set[int] = set()
    while job.poll() is None:
        process = processes(job.pid).get(1)
        if process is not None and process not in killed:
            os.kill(process, signal.SIGKILL)
            killed.add(process)
        time.sleep(0.05)
    said = job.communicate()[1]
    assert job.returncode == 1
    assert len(killed) == 3
    assert "given up: 3 attempts in a row ended without getting further than step 0" in said


def saved(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.partition("-")[2]) for path in published(run)), default=0)


def steps_done(run: Path) -> int:
    """The newest step in the log, cheaply."""
    path = run / "events.jsonl"
    if not path.exists():
        return 0
    found = re.findall(r'"kind": "step".*?"step": (\d+)', path.read_text(errors="replace"))
    return int(found[-1]) if found else 0


def seen(run: Path, enough: Callable[[list[str]], bool]) -> list[str]:
    """How each rank is, as soon as the page shows that."""
    states, ends = list[str](), time.monotonic() + 25
    while not (states and enough(states)) and time.monotonic() < ends:
        states = [rank["state"] for node in WatchedRun(run, "run").nodes() for rank in node["ranks"]]
        time.sleep(0.05)
    return states


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes(launcher: int) -> dict[int, int]:
    """The process of each rank, as its signs of life have it."""
    children = children_of(launcher)
    folders = Path(tempfile.gettempdir()).glob("glm-accelerate-*")
    there = [sign for folder in folders for sign in signs(folder)]
    return {sign.rank: sign.process for sign in there if sign.process in children}
