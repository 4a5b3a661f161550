import math
from pathlib import Path

import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe import sinks
from glm_accelerate.observe.events import Event, Events
from glm_accelerate.observe.sinks import curves, open_sinks
from glm_accelerate.runtime.errors import UserError

CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t.jsonl"}})


def train(names: list[str], run_dir: Path, attempt: int, kind: str, first: int, last: int) -> None:
    events = Events(open_sinks(names, run_dir, CONFIG), attempt)
    events.emit(kind, {"step": first - 1, "steps": 10})
    for step in range(first, last + 1):
        events.emit("step", {"step": step, "loss": attempt * 100.0 + step, "learning_rate": 0.1})
    events.emit("eval", {"step": last, "loss": 0.5, "metrics": {"exact_match": 0.25}})
    events.emit("eval", {"step": last - 2, "loss": 0.75, "metrics": {}})  # it came late
    events.emit("eval", {"step": last - 1, "status": "skipped", "loss": None, "metrics": {}})
    events.close()


def test_the_points_of_an_event() -> None:
    assert curves({"kind": "step", "step": 1, "loss": None, "grad_norm": 2, "tokens": 3}) == {
        "train/grad_norm": 2.0
    }
    assert curves({"kind": "eval", "step": 1, "loss": 1.5, "metrics": {"exact_match": 0.5}}) == {
        "eval/loss": 1.5,
        "eval/exact_match": 0.5,
    }
    assert curves({"kind": "checkpoint", "step": 1}) == {}


def test_a_sink_that_fails_ends_no_run() -> None:
    class Server:
        def observe(self, event: Event) -> None:
            if event["kind"] == "step":
                raise RuntimeError("503")

        def close(self) -> None:
            raise KeyError("session")

    class Witness:
        def __init__(self) -> None:
            self.heard: list[Event] = []

        def observe(self, event: Event) -> None:
            self.heard.append(event)

        def close(self) -> None:
            pass

    witness = Witness()
    events = Events([sinks.ForeignSink(Server()), witness], 1)
    for step in (1, 2):
        events.emit("step", {"step": step})
    events.close()
    assert [event["kind"] for event in witness.heard] == ["step", "warning", "step"]
    assert "Server: 503" in str(witness.heard[1]["said"])
    Events([sinks.ForeignSink(Server())], 1).close()


@pytest.mark.filterwarnings("default")  # the package's own reader warns of its age
def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(["tensorboard"], tmp_path, 1, "start", 1, 6)
    train(["tensorboard"], tmp_path, 2, "resume", 4, 8)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    points = {point.step: point.value for point in read.Scalars("train/loss")}
    assert points == {1: 101, 2: 102, 3: 103, 4: 204, 5: 205, 6: 206, 7: 207, 8: 208}
    assert [(point.step, point.value) for point in read.Scalars("eval/exact_match")] == [(8, 0.25)]
    assert sorted((point.step, point.value) for point in read.Scalars("eval/loss")) == [(6, 0.75), (8, 0.5)]
    assert math.isclose(read.Scalars("train/learning_rate")[0].value, 0.1, rel_tol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "left"), [("start", {0: 200, 1: 201}), ("resume", {0: 100, 1: 201})])
def test_a_run_that_begins_anew_takes_back_the_whole_curve(
    kind: str, left: dict[int, float], tmp_path: Path
) -> None:
    """Whatever is at step 0 stays for one that goes on from there."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def point(attempt: int, kind: str, first: int, last: int) -> None:
        events = Events(open_sinks(["tensorboard"], tmp_path, CONFIG), attempt)
        events.emit(kind, {"step": 0})
        for step in range(first, last + 1):
            events.emit("step", {"step": step, "loss": attempt * 100.0 + step})
        events.close()

    point(1, "start", 0, 6)
    point(2, kind, 0 if kind == "start" else 1, 1)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {point.step: point.value for point in read.Scalars("train/loss")} == left


@pytest.mark.filterwarnings("default")
def test_swanlab_writes_offline_without_a_login_and_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "very-secret-token")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    train(["swanlab"], run, 1, "start", 1, 5)
    files = [path for path in (run / "swanlab").rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert b"exact_match" in written
    assert b"very-secret-token" not in written


def test_a_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboard is not installed.*pip install"):
        open_sinks(["tensorboard"], tmp_path, CONFIG)
