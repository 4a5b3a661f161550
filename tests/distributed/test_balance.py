"""Shares that follow a slow rank, through a kill; test_context.py: uneven shares are one process."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.demo.tiny import Size, write_tiny
from tests.distributed.test_ranks import processes, steps_done
from tests.warm import Warm

WORDS = [f"w{number}" for number in range(100)]
SHAPE = Size(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128)


@pytest.fixture
def config(tmp_path: Path, tiny_run: dict[str, Any]) -> Path:
    """Samples of very uneven lengths, of which a step takes long enough for clocks."""
    drawn = random.Random(0)
    model = write_tiny(tmp_path / "larger", WORDS, size=SHAPE)

    def line() -> str:
        answer = " ".join(drawn.choices(WORDS, k=min(500, 8 + int(drawn.lognormvariate(4, 1)))))
        asked = {"role": "user", "content": "w1"}, {"role": "assistant", "content": answer}
        return json.dumps({"messages": asked}) + "\n"

    for name, count in (("train", 60), ("dev", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(line() for _ in range(count)))
    said = tiny_run | {
        "model": {"path": str(model), "dtype": "float32"},
        "adapt": {"method": "full"},
        "data": {**tiny_run["data"], "max_tokens": 512},
        "train": {"steps": 15, "step_samples": 4, "micro_tokens": 576},
        "optim": {"learning_rate": 1e-3},
        "precision": {"compute": "float32", "compile": "off"},
        "evaluate": {"every": 1000, "where": "inline", "metrics": ["loss"]},
        "checkpoint": {"every": 7, "wait": True},
        "parallel": {"balance": "measured"},
    }
    path = tmp_path / "balance.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


@contextmanager
def slowed(process: int) -> Generator[None, None, None]:
    """It computes a sixth of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(process, signal.SIGSTOP)
                time.sleep(0.025)
                os.kill(process, signal.SIGCONT)
                time.sleep(0.005)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def raw(run: Path, kind: str) -> list[dict[str, Any]]:
    """Events of all attempts."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


def until(job: Warm, run: Path, step: int) -> None:
    while steps_done(run) < step:
        assert job.poll() is None, job.communicate()
        time.sleep(0.005)


@pytest.mark.prove  # it is about time, which a busy machine has little of
def test_a_slow_rank_has_a_smaller_share_through_a_kill_and_until_it_is_fast_again(
    config: Path, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    run, here = tmp_path / "run", "glm_accelerate.training.balance."
    words = ["train", str(config), "--run", str(run), "--nproc", "2", "parallel.shard=full"]
    job = warm(*words, other={f"{here}ENOUGH": 0.01, f"{here}LOOK": 7, f"{here}WINDOW": 9})
    until(job, run, 1)
    with slowed(processes(job.pid)[1]):
        until(job, run, 9)
        os.kill(processes(job.pid)[1], signal.SIGKILL)
    said = "".join(job.communicate(timeout=120))
    assert job.returncode == 0, said
    decided = [(event["step"], event["shares"]) for event in raw(run, "decision") if "shares" in event]
    assert [step for step, _ in decided] == [0, 7, 7, 14]
    (_, shares), (_, resumed), (_, back) = decided[1:]
    assert shares[1] < 0.6 * shares[0]
    assert resumed == shares
    assert back[1] > shares[1]
    # What was done again after the kill was dealt as before, to the last bit.
    again = [event for event in raw(run, "step") if event["step"] > 7]
    twice = {event["step"] for event in again if event["attempt"] == 1}
    assert len(twice) >= 2
    for step in twice:
        one, other = ((event["loss"], event["grad_norm"]) for event in again if event["step"] == step)
        assert one == other
    named = [event["rank"] for event in raw(run, "warning") if "times" in event]
    assert named[0] == 1


def test_layers_move_at_a_checkpoint_and_stay_moved(
    config: Path, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """Of nine layers on one stage and one on the other; the run learns what it learns unmoved."""
    here, model = "glm_accelerate.training.stages.", tmp_path / "deep"
    write_tiny(model, WORDS, size=replace(SHAPE, layers=10))
    cut, other = "parallel.pipeline=[9,1]", {f"{here}ENOUGH": 0.0, f"{here}REPAID": 0.0, f"{here}FEWEST": 3}

    def go(run: Path, steps: int, balance: str) -> None:
        many = "data.max_tokens=128", "train.micro_tokens=128", "train.step_samples=12"  # passes a step
        more = (
            f"model.path={model}",
            f"train.steps={steps}",
            f"parallel.balance={balance}",
            cut,
            *many,
            "optim.schedule=constant",
        )
        words = "train", str(config), "--run", str(run), "--nproc", "2", *more, "--accept-changes"
        job = warm(*words, other=other)
        said = "".join(job.communicate(timeout=120))
        assert job.returncode == 0, said

    go(tmp_path / "still", 9, "cost")
    for number in range(3):  # times hide it now and then where others have the processor
        run = tmp_path / f"moved-{number}"
        go(run, 8, "measured")
        decisions = [event for event in raw(run, "decision") if "stages" in event]
        if decisions:
            break
    (decision,) = decisions
    first, last = decision["stages"]
    assert (decision["step"], first + last) == (7, 10)
    assert first < 9
    go(run, 9, "measured")
    assert json.loads((run / "plan.json").read_text())["stages"] == [first, last]
    starts = [(event["kind"], event["step"]) for event in raw(run, "start") + raw(run, "resume")]
    assert starts == [("start", 0), ("resume", 7), ("resume", 8)]
    for moved, still in zip(raw(run, "step"), raw(tmp_path / "still", "step"), strict=True):
        assert moved["loss"] == pytest.approx(still["loss"], rel=1e-5)
        assert moved["grad_norm"] == pytest.approx(still["grad_norm"], rel=1e-4)
