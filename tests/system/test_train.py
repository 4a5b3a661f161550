"""Whole runs of real processes: resumed ones equal uninterrupted ones bit for bit, bad days lose nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from glm_accelerate.checkpoint.codec import CodecChoice
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import Dealing
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.evaluate.statistics.decide import ScoredStep
from glm_accelerate.observe.events import read_events
from glm_accelerate.optim.precision import Scale
from glm_accelerate.plan import resolve
from glm_accelerate.plan.budget import Pace
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training import saver
from glm_accelerate.training.build import Built
from glm_accelerate.training.mismatch import EVERY
from glm_accelerate.training.run import Result, train
from glm_accelerate.training.settle import Start
from glm_accelerate.training.spike import Level
from glm_accelerate.training.state import Progress, Wide
from tests.checkpoints import latest
from tests.warm import Warm

Said = dict[str, Any]


def config(said: Said, **sections: Said) -> RunConfig:
    merged = {key: {**said.get(key, {}), **sections.get(key, {})} for key in said.keys() | sections.keys()}
    return RunConfig.model_validate(merged)


def go(
    said: Said,
    directory: Path,
    *,
    stop_after: int | None = None,
    start: Start | None = None,
    **sections: Said,
) -> Result:
    return train(config(said, **sections), directory, stop_after=stop_after, start=start or Start())


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything that training has moved, at a step."""
    reader = Reader(run / "checkpoints" / f"checkpoint-{step}")
    return {**reader.group("weights"), **reader.group("optimizer")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps(run: Path) -> dict[int, tuple[float, float, float]]:
    """What each step reported that must not depend on interruptions."""
    return {
        event["step"]: (event["loss"], event["grad_norm"], event["learning_rate"])
        for event in read_events(run / "events.jsonl")
        if event["kind"] == "step"
    }


def test_a_run_from_python_keeps_few_kernels(
    tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one from the command line does: else memory climbs with every length of a step."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that it is put back
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    go(tiny_run, tmp_path / "run", train={"steps": 1, "step_samples": 4})
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "16"


ENDLESS = ["train.steps=100000", "precision.compile=off", "evaluate.where=inline"]
FRESH = [sys.executable, "-m", "glm_accelerate.cli.main"]


Whole = tuple[dict[str, torch.Tensor], dict[int, tuple[float, float, float]]]


@pytest.fixture(scope="module")
def finished() -> list[Whole]:
    """What a run of `tiny_run` came to, once a test has made it."""
    return []


@pytest.fixture
def whole(finished: list[Whole], tiny_run: Said, tmp_path: Path) -> Whole:
    """The last state and the steps of a run that nothing interrupted, made once for all tests here."""
    if not finished:
        go(tiny_run, tmp_path / "whole")
        finished.append((state(tmp_path / "whole", 14), steps(tmp_path / "whole")))
    return finished[0]


@pytest.fixture
def command(tiny_run: Said, tmp_path: Path) -> list[str]:
    """The command of the run, with its config in a file."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_run))
    return ["train", str(tmp_path / "tiny.yaml"), "--run", str(tmp_path / "run")]


ENDS = (1, 5, 6, 8)  # after the first step, and around an end of an epoch
OTHERS = ("full", "prefix", "freeze")


@pytest.mark.parametrize(
    ("method", "ends"),
    [
        ("lora", ENDS),
        *((method, (6,)) for method in OTHERS),
        *(pytest.param(method, ENDS, marks=pytest.mark.prove) for method in OTHERS),
    ],
)
def test_resume_is_bit_identical(method: str, ends: Sequence[int], tiny_run: Said, tmp_path: Path) -> None:
    """22 samples in steps of 4: the run passes two ends of epochs."""
    adapt = {"method": method, "prefix_tokens": 4, "layers": 1}
    whole = go(tiny_run, tmp_path / "whole", adapt=adapt)
    assert whole.done
    parts = tmp_path / "parts"
    for stop_after in ends:
        assert not go(tiny_run, parts, adapt=adapt, stop_after=stop_after).done
    assert go(tiny_run, parts, adapt=adapt).done
    assert same(state(tmp_path / "whole", 14), state(parts, 14))
    assert steps(tmp_path / "whole") == steps(parts)
    resumed = [event["step"] for event in read_events(parts / "events.jsonl") if event["kind"] == "resume"]
    assert resumed == [*ends]


def test_evaluation_does_not_touch_training(whole: Whole, tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "without", data={"dev": None})
    assert same(whole[0], state(tmp_path / "without", 14))


def test_all_counts_come_back() -> None:
    """Those of bad steps too, which no healthy run has: none keeps the value that it starts with."""
    losses, level = {3: 0.5, 9: 0.25}, Level(usual=0.7, jumped=8, calm=1)
    told = Progress(
        position=9,
        applied=6,
        bad_in_a_row=1,
        bad=3,
        tokens=123,
        losses=losses,
        level=level,
        scale=Scale(2.0, 5),
        wide=Wide(1, ("layers.1",)),
        dealing=Dealing(0.5, (1.0, 0.5), together=True, moves=True),
        judging=EvaluationHistory(
            [3, 9], {3: ScoredStep(3, 0.5, "done", 1, "tied")}, "0123abcd", decided=3, lowered=1
        ),
        pace=Pace(every=3, samples=20, spent=1.5, trained=30.0),
    )
    assert Progress.from_json(json.loads(json.dumps(told.to_json()))) == told
    fresh = Progress()
    for one, other in ((told, fresh), (told.judging, fresh.judging)):
        assert all(getattr(one, field.name) != getattr(other, field.name) for field in fields(one))


def test_killed_anywhere_it_goes_on(
    command: list[str], whole: Whole, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """SIGKILL at different moments, until the run gets through; the result is as if nothing had happened."""
    events = tmp_path / "run" / "events.jsonl"
    for wanted in (2, 7, 11):
        process = warm(*command)
        while process.poll() is None:
            if events.exists() and max(steps(tmp_path / "run"), default=0) >= wanted:
                process.kill()
                break
            time.sleep(0.01)
        process.wait()
    assert warm(*command).wait(120) == 0
    assert same(whole[0], state(tmp_path / "run", 14))
    assert whole[1] == steps(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_exit_75(
    number: signal.Signals, command: list[str], tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    process = warm(*command, *ENDLESS)
    events = tmp_path / "run" / "events.jsonl"
    while process.poll() is None and not (events.exists() and len(steps(tmp_path / "run")) >= 3):
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "run the same command again" in output
    found, _ = latest(tmp_path / "run")
    assert found is not None
    assert found.name == f"checkpoint-{max(steps(tmp_path / 'run'))}"


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_an_explicit_start_reads_no_directory_of_checkpoints(
    command: list[str], tiny_run: Said, tmp_path: Path
) -> None:
    """The kernel says so of the whole command, until it trains; its first save ends the branch after it."""
    run, log = tmp_path / "run", tmp_path / "log"
    all_stay: Said = {"keep_last": 100}  # a slow machine saves more often: the fourth would be dropped
    go(tiny_run, run, stop_after=4, checkpoint=all_stay)
    named = run / "checkpoints" / "checkpoint-4"
    go(tiny_run, run, stop_after=8, checkpoint=all_stay)
    paths = ["-P", str(named.parent), "-P", str(run / "events.jsonl")]
    traced = ["strace", "-f", "-y", "-s", "200", "-e", "trace=getdents64,write", *paths, "-o", str(log)]
    words = [*traced, *FRESH, *command, "checkpoint.keep_last=100", "--resume", str(named)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    before, training, after = log.read_text().partition('\\"kind\\": \\"step\\"')
    assert "resume" in before
    assert training
    assert "getdents64" not in before
    assert "getdents64" in after  # the trace sees it
    assert (run / "abandoned" / "checkpoint-8").is_dir()


def test_only_one_trainer_a_directory(
    tiny_run: Said, command: list[str], tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    process = warm(*command, *ENDLESS)
    try:
        while not (tmp_path / "run" / "events.jsonl").exists():
            time.sleep(0.02)
        with pytest.raises(UserError, match=rf"process {process.pid} .* is training here"):
            go(
                tiny_run,
                tmp_path / "run",
                train={"steps": 100000},
                precision={"compile": "off"},
                evaluate={"where": "inline"},
            )
    finally:
        process.kill()
        process.wait()
    assert go(tiny_run, tmp_path / "run", start=Start(accept=EVERY)).done  # the lock died with its holder


def test_a_changed_config_is_shown_and_refused(
    command: list[str], tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    first = warm(*command, "train.steps=2").done()
    assert first.returncode == 0, first.stderr
    second = warm(*command, "train.steps=3").done()
    assert second.returncode == 2
    assert second.stdout.split()[-5:] == ["train.steps", "2", "3", "--accept", "schedule"]
    assert "--accept-changes" in second.stderr
    third = warm(*command, "train.steps=3", "--accept-changes").done()
    assert third.returncode == 0, third.stderr
    assert max(steps(tmp_path / "run")) == 3


def test_a_mistake_before_the_first_step_can_be_mended(tiny_run: Said, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        go(tiny_run, tmp_path / "run", data={"train": str(tmp_path / "nowhere.jsonl")})
    assert go(tiny_run, tmp_path / "run").done


def test_a_damaged_checkpoint_is_passed_over(whole: Whole, tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(tiny_run, run, stop_after=8)
    damaged = run / "checkpoints" / "checkpoint-8" / "weights-0-of-1.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    for name in ("checkpoint-abc", "checkpoint-9999-tmp", "checkpoint-007"):
        (run / "checkpoints" / name).mkdir()
    assert go(tiny_run, run).done
    warnings = [event["said"] for event in read_events(run / "events.jsonl") if event["kind"] == "warning"]
    assert any("weights-0-of-1.safetensors is damaged" in said for said in warnings)
    assert same(whole[0], state(run, 14))
    assert (run / "abandoned" / "checkpoint-8").is_dir()
    with pytest.raises(UserError, match="damaged"):
        go(tiny_run, run, start=Start(resume=str(run / "abandoned" / "checkpoint-8")))


def test_gradients_that_are_not_finite(tiny_run: Said, tmp_path: Path) -> None:
    """After an absurd step the loss overflows: no further one is applied, and the run stops at the limit."""
    said = config(tiny_run, train={"max_bad_steps": 3}, optim={"clip": 0.0, "warmup": 0.0})
    absurd = said.optim.model_copy(update={"learning_rate": 1e30})  # as no config can say it
    with pytest.raises(UserError, match=r"not finite 3 steps in a row \(up to step 4\)"):
        train(said.model_copy(update={"optim": absurd}), tmp_path / "run")
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"]
    assert [event["applied"] for event in events] == [True, False, False, False]
    assert [event["loss"] for event in events[1:]] == [None] * 3
    assert len({event["learning_rate"] for event in events[1:]}) == 1  # the schedule stood still


def test_weights_that_are_not_finite_never_start(tiny_run: Said, tmp_path: Path) -> None:
    weights = Path(tiny_run["model"]["path"]) / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        go(tiny_run, tmp_path / "run")


def test_other_data_cannot_be_resumed_on(tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "run", stop_after=4)
    train_file = Path(tiny_run["data"]["train"])
    train_file.write_text(train_file.read_text().replace("red", "green", 1), encoding="utf-8")
    with pytest.raises(UserError, match="the data is not what this checkpoint was made with"):
        go(tiny_run, tmp_path / "run")


def test_prepared_data_that_are_damaged_are_named_and_made_anew(tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "run", stop_after=2)
    damaged = list((tmp_path / "cache").rglob("tokens.bin"))
    for path in damaged:
        path.write_bytes(bytes(byte ^ 4 for byte in path.read_bytes()))
    go(tiny_run, tmp_path / "run", stop_after=4)
    go(tiny_run, tmp_path / "whole", stop_after=4)
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    said = [str(event["said"]) for event in read_events(tmp_path / "run" / "events.jsonl") if "said" in event]
    assert len([line for line in said if "could not be used and was made anew" in line]) == len(damaged) == 2


def test_resume_from_a_step_gives_up_what_came_after(tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steady: dict[str, Said] = {"checkpoint": {"wait": True}, "evaluate": {"every": 3}}
    first = go(tiny_run, run, **steady)
    again = go(tiny_run, run, **steady, start=Start(resume="9"))
    assert first.done
    assert again.done
    assert (run / "abandoned" / "checkpoint-14").is_dir()
    with pytest.raises(UserError, match="no checkpoint of step 5"):
        go(tiny_run, run, **steady, start=Start(resume="5"))


def test_compression_begins_when_it_was_found_to_pay(
    tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is weighed after the first checkpoint, on what that one took."""
    monkeypatch.setattr(saver, "WEIGHED", 0.0)
    weighed: list[float] = []

    def choose(sample: memoryview, item_bytes: int, disk: float, cores: int) -> CodecChoice:
        weighed.append(disk)
        return CodecChoice("zstd", "the disk is slow")

    monkeypatch.setattr(saver.codec, "choose", choose)
    run = tmp_path / "run"
    sections: dict[str, Said] = {
        "checkpoint": {"every": 4, "keep_last": 9, "wait": True},
        "data": {"dev": None},
    }
    assert go(tiny_run, run, **sections).done
    assert [Reader(path).manifest.codec for path in reversed(published(run))] == ["none", *["zstd"] * 3]
    events = read_events(run / "events.jsonl")
    assert [
        event["said"] for event in events if event["kind"] == "decision" and "codec" in event["said"]
    ] == ["checkpoint.codec: zstd (the disk is slow)"]
    first = next(event for event in events if event["kind"] == "checkpoint")
    assert weighed == [pytest.approx(first["bytes"] / 1e6 / first["total_seconds"])]
    assert latest(run)[0] is not None


def test_a_finished_run_has_nothing_to_do(tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "run")
    before = state(tmp_path / "run", 14)
    assert go(tiny_run, tmp_path / "run").done
    assert same(before, state(tmp_path / "run", 14))


def test_what_a_second_start_keeps_is_not_called_the_config(tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whys: list[dict[str, str]] = []
    for steps in (3, 6):
        go(tiny_run, run, stop_after=steps)
        reasons = json.loads((run / "plan.json").read_text())["reasons"]
        whys.append({reason["name"]: reason["why"] for reason in reasons})
    names = ("tokens in one pass", "shards", "where")
    assert [whys[1][name] for name in names] == ["as the run began"] * 3
    assert "the config" not in [whys[0][name] for name in names]


@pytest.mark.parametrize("further", [{}, {"steps": 20}])
def test_a_resume_computes_as_the_run_began_unless_it_is_longer(
    tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: Said
) -> None:
    """How fast a machine is today decides whether compiling pays, and that how numbers are summed."""
    run, plain = tmp_path / "run", {"compute": "float32"}
    monkeypatch.setattr(resolve, "missing", lambda _: None)
    go(tiny_run, run, stop_after=3, precision=plain)
    monkeypatch.setattr(resolve, "WORTH_COMPILING", 0.0)
    longer, start = config(tiny_run, precision=plain, train=further), Start(accept=frozenset(["schedule"]))

    def look(ready: Built) -> None:
        assert ready.run.plan.compile is bool(further)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(longer, run, start=start, on_built=look)


def test_what_stays(tiny_run: Said, tmp_path: Path) -> None:
    """The newest three, and the best by held-out loss, wherever it lies."""
    result = go(
        tiny_run,
        tmp_path / "run",
        optim={"learning_rate": 3.0, "schedule": "constant", "warmup": 0.0, "clip": 0.0},
        evaluate={"every": 3},
        checkpoint={"wait": True},
    )
    there = sorted(
        int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*")
    )
    best = min((loss, step) for step, loss in result.losses.items() if step)[1]
    assert there == sorted({9, 12, 14} | {best})
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "checkpoint-14\n"


def test_init_from_an_adapter_and_a_run(tiny_run: Said, tmp_path: Path) -> None:
    """Both begin on the other run's best weights: the first held-out loss of one is that of the other."""
    from glm_accelerate.assemble.model import open_model
    from glm_accelerate.models.adapter_files import save_adapter

    first = go(tiny_run, tmp_path / "first")
    opened = open_model(tmp_path / "first")
    save_adapter(opened.model, tmp_path / "adapter")
    step = opened.step
    assert step is not None
    assert first.losses[step] < min(first.losses.values()) + 0.002  # as good as equal: the earlier
    for name, source in (("from-adapter", tmp_path / "adapter"), ("from-run", tmp_path / "first")):
        second = go(tiny_run, tmp_path / name, start=Start(init_from=source), train={"steps": 1})
        assert second.losses[0] == pytest.approx(first.losses[step], rel=1e-4)


def test_a_run_on_another_run_resumes_on_the_same_weights(tiny_run: Said, tmp_path: Path) -> None:
    """What --init-from named stays the base: for a resume, and for whoever opens the checkpoint."""
    from glm_accelerate.assemble.model import open_model

    go(tiny_run, tmp_path / "first")
    start = Start(init_from=tmp_path / "first")
    go(tiny_run, tmp_path / "whole", start=start)
    go(tiny_run, tmp_path / "parts", start=start, stop_after=5)
    go(tiny_run, tmp_path / "parts")
    assert same(state(tmp_path / "whole", 14), state(tmp_path / "parts", 14))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        opened = open_model(tmp_path / "whole").model(tokens)
        alone = open_model(tmp_path / "first").model(tokens)
    assert not torch.equal(opened, alone)
    (tmp_path / "whole" / "init_from").unlink()
    with pytest.raises(UserError, match="made with another model"):
        open_model(tmp_path / "whole")


def test_disk_full_while_saving_keeps_the_old(
    command: list[str], tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """A limit on file size stands for a full disk: the save fails by name, what was published stays whole."""
    assert warm(*command, "train.steps=3").wait(120) == 0
    limited = f"ulimit -f 8; exec {' '.join([*FRESH, *command])} train.steps=6 --accept-changes"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        ["bash", "-c", limited], check=False, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 2, result.stderr
    assert "checkpoint" in result.stderr
    found, reasons = latest(tmp_path / "run")
    assert found is not None
    assert found.name == "checkpoint-3"
    assert not reasons
    shutil.rmtree(tmp_path / "run" / "abandoned", ignore_errors=True)
