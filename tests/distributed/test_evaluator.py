"""An evaluator of several ranks: models that are divided over them, and ranks that fail or die."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.measuring.rebuild import glm_examiner
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.messages import Request, exam_id_of
from glm_accelerate.parallel.part import part_of
from glm_accelerate.training.run import train
from tests.warm import Warm

Said = dict[str, Any]
RANKS = 2
OWN = '''
"""An examiner whose ranks add up what each has measured, again and again; RUN/mood says who fails how."""
import time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from glm_accelerate.evaluate.protocol import evaluator
from glm_accelerate.evaluate.protocol.messages import Findings
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, exam_id_of


class Own:
    exam_id = exam_id_of({"together": 2})

    def smaller(self):
        return False

    def examine(self, request, run, against):
        mood = Path(run) / "mood"
        word = mood.read_text() if mood.exists() else "well"
        if word == "both" or (word == "one" and dist.get_rank() == 1):
            raise KeyError(f"on rank {dist.get_rank()}")
        total = torch.ones(1)
        for _ in range(10_000 if word == "long" else 3):
            dist.all_reduce(total)
            total /= 2
            time.sleep(0.01)
        loss = total.item()
        return Findings(EvaluationResult(request.step, request.exam_id, request.attempt, "done", loss=loss))


def make(run):
    evaluator.LOCKSTEP = timedelta(seconds=1)
    return Own()
'''


@pytest.fixture
def start(tmp_path: Path, warm: Callable[..., Warm]) -> Callable[..., list[Warm]]:
    """start(run, *words): an evaluator's ranks as a launcher starts them; none is left after the test."""

    def begin(run: Path, *words: str) -> list[Warm]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["evaluate", "--follow", str(run), *words]
        ranks: list[Warm] = []
        for rank in range(RANKS):
            said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
            surroundings = os.environ | {name: str(value) for name, value in said.items()}
            ranks.append(warm(*command, cwd=tmp_path, env=surroundings | {"MASTER_ADDR": "127.0.0.1"}))
        return ranks

    return begin


def until(done: Callable[[], bool], seconds: float = 100) -> None:
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("divided", [True, False])
def test_several_ranks_find_what_one_finds(
    divided: bool, tiny_run: Said, tmp_path: Path, start: Callable[..., list[Warm]]
) -> None:
    """Divided as the run is, or each with the whole model and its share of the samples."""
    said = {
        **tiny_run,
        "adapt": {"method": "full"},
        "train": {"steps": 2, "step_samples": 4},
        "precision": {"compute": "float32"},
        "evaluate": {**tiny_run["evaluate"], "every": 2, "where": "inline"},
        "checkpoint": {"every": 1, "wait": True},
    }
    (tmp_path / "ranks.yaml").write_text(yaml.safe_dump(said))
    run = tmp_path / "run"
    train(load_config(tmp_path / "ranks.yaml"), run)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "shards": RANKS if divided else 1}))
    alone = glm_examiner(run, "cpu")
    requests = [Request(step, alone.exam_id, 9, f"checkpoints/checkpoint-{step}") for step in (1, 2)]
    for request in requests:
        ledger.post(run, request)
    codes = [one.wait(120) for one in start(run, "--once")]
    assert codes == [0] * RANKS
    for request in requests:
        found = ledger.read(run, request.stem)
        expected = alone.examine(request, str(run), None).result
        assert found is not None
        assert found.status == "done", found.reason
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.metrics == expected.metrics
    assert not list((run / "evals").glob("*.claim"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_ranks.py").write_text(OWN)
    run = tmp_path / "run"
    run.mkdir()
    made = Checkpointer(run, run_id="f00d", kind="snapshot")
    made.save(Save(3, 1, {"weights": {"w": part_of(torch.ones(4))}}, {}, {"data": "d"}, {}))
    (outcome,) = made.close(10)
    assert outcome.error is None
    return run


def ask(run: Path, attempt: int) -> Request:
    request = Request(3, exam_id_of({"together": 2}), attempt, "snapshots/snapshot-3")
    ledger.post(run, request)
    return request


def test_ranks_that_fail(run: Path, start: Callable[..., list[Warm]]) -> None:
    """All alike: a failed evaluation, and on to the next. One alone: it says why and ends the job, which
    could answer nothing more.
    """
    (run / "mood").write_text("both")
    first = ask(run, 1)
    ranks = start(run, "--build", "own_ranks:make")
    until(lambda: ledger.read(run, first.stem) is not None)
    found = ledger.read(run, first.stem)
    assert found is not None
    assert (found.status, found.reason) == ("failed", "rank 0: KeyError: 'on rank 0'")
    (run / "mood").write_text("well")
    second = ask(run, 2)
    until(lambda: ledger.read(run, second.stem) is not None)
    found = ledger.read(run, second.stem)
    assert found is not None
    assert (found.status, found.loss) == ("done", 1.0)
    assert [one.poll() for one in ranks] == [None] * RANKS
    (run / "mood").write_text("one")
    third = ask(run, 3)
    assert all(one.wait(120) != 0 for one in ranks)
    found = ledger.read(run, third.stem)
    assert found is not None
    assert (found.status, found.reason) == ("failed", "KeyError: 'on rank 1'")
    assert not ledger.is_claimed(run, third)


def test_a_rank_that_dies(run: Path, start: Callable[..., list[Warm]]) -> None:
    """The others end, too, and what was claimed is free: another job answers it."""
    (run / "mood").write_text("long")
    request = ask(run, 1)
    ranks = start(run, "--build", "own_ranks:make")
    until(lambda: ledger.is_claimed(run, request))
    time.sleep(0.3)
    ranks[1].send_signal(signal.SIGKILL)
    assert ranks[0].wait(120) != 0
    assert ledger.waiting(run) == [request]
    assert not ledger.is_claimed(run, request)
    (run / "mood").write_text("well")
    assert [one.wait(120) for one in start(run, "--build", "own_ranks:make", "--once")] == [0] * RANKS
    found = ledger.read(run, request.stem)
    assert found is not None
    assert found.status == "done"
