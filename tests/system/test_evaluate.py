"""`evaluate` as a person runs it: on whatever a run leaves, by hand, beside, and as a page."""

import gzip
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from glm_accelerate.cli.main import main
from glm_accelerate.evaluate.protocol.ledger import post, results
from glm_accelerate.evaluate.protocol.messages import Request
from tests.warm import Warm


def trained(said: dict[str, Any], directory: Path, **evaluate: Any) -> Path:
    """A finished run."""
    said = {
        **said,
        "evaluate": {"every": 7, "max_new_tokens": 6, **evaluate},
        "checkpoint": {"every": 7},
        "precision": {"compute": "float32"},
    }
    (directory / "my.yaml").write_text(yaml.safe_dump(said))
    assert main(["train", str(directory / "my.yaml"), "--run", str(directory / "run")]) == 0
    return directory / "run"


def figures(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What it says for programs."""
    capsys.readouterr()
    code = main(["evaluate", *map(str, words), "--json"])
    out, complaints = capsys.readouterr()
    assert code == 0, complaints
    return json.loads(out)


def complaint(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """One line, and exit code 2."""
    capsys.readouterr()
    code = main(["evaluate", *map(str, words)])
    out, complaints = capsys.readouterr()
    assert (code, out) == (2, ""), complaints
    (line,) = complaints.splitlines()
    return line


def test_whatever_a_run_leaves_has_the_same_loss(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In training, as the run, its checkpoint, a whole model and an adapter beside its base."""
    run = trained(tiny_run, tmp_path, where="inline", samples="all")
    assert " stopped at step 14: done · best: step 14, loss " in capsys.readouterr().out
    newest, base, dev = run / "checkpoints/checkpoint-14", tiny_run["model"]["path"], tiny_run["data"]["dev"]
    assert main(["export", str(run), str(tmp_path / "whole"), "--merge"]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    assert "adapter of step 14 (the best) in " in capsys.readouterr().out
    in_training = {result.step: result.loss for result in results(run)}
    said = [
        figures(capsys, run),
        figures(capsys, newest),
        figures(capsys, newest, "--data", dev),
        figures(capsys, tmp_path / "whole", "--data", dev),
        figures(capsys, tmp_path / "adapter", "--base", base, "--data", dev),
    ]
    assert {(one["samples"], one["total"]) for one in said} == {(4, 4)}
    assert [one["loss"] for one in said] == pytest.approx([in_training[14]] * 5, rel=1e-5)
    assert said[0]["step"] == 14
    assert said[0]["plan"] == results(run)[0].exam_id  # it was asked what the run's steps are asked
    earlier = figures(capsys, run / "checkpoints/checkpoint-7")
    assert (earlier["against"]["step"], earlier["against"]["verdict"]) == (14, "worse")  # the run's best
    before = figures(capsys, base, "--data", dev)["loss"]
    assert before == pytest.approx(in_training[0], rel=1e-5)
    assert abs(before - said[0]["loss"]) > 0.01  # training did something, and that is seen


def test_a_run_is_asked_what_is_said_instead(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, said = trained(tiny_run, tmp_path, where="inline"), tmp_path / "said.jsonl"
    words = ["--samples", "3", "--metrics", "loss", "exact_match", "--predictions", said]
    found = figures(capsys, run / "checkpoints/checkpoint-7", *words)
    assert (found["step"], found["samples"], found["answers"]) == (7, 3, 3)
    assert set(found["metrics"]) == {"exact_match"}
    lines = [json.loads(line) for line in said.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["reference"].strip() not in line["prompt"]
        assert set(line["scores"]) == {"exact_match"}
    reduced = figures(capsys, run, "--precision", "bfloat16")
    assert reduced["by"]["dtype"] == "bfloat16"
    assert abs(reduced["float32_difference"]) < 0.1
    assert main(["evaluate", str(run), "--samples", "3"]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head == f"step 14, the best of {run} (checkpoints/checkpoint-14)"
    assert table[0].startswith("metric")


def test_other_data_is_asked_as_the_run_asks_also_where_its_model_has_moved(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, moved, dev = tmp_path / "base", tmp_path / "moved", tiny_run["data"]["dev"]
    shutil.copytree(tiny_run["model"]["path"], base)
    said = {**tiny_run, "model": {**tiny_run["model"], "path": str(base)}}
    run = trained(said, tmp_path, where="inline", metrics=["loss", "exact_match"], precision="bfloat16")
    base.rename(moved)
    for words in ((), ("--data", dev)):
        assert "base" in complaint(capsys, run / "checkpoints/checkpoint-14", *words)
        found = figures(capsys, run, *words, "--base", moved)
        assert (found["step"], found["answers"], found["by"]["dtype"]) == (14, 4, "bfloat16")
        assert set(found["metrics"]) == {"exact_match"}
    instead = ["--metrics", "loss", "--precision", "float32", "--base", moved]
    found = figures(capsys, run, "--data", dev, *instead)
    assert (found["metrics"], found["by"]["dtype"]) == ({}, "float32")


def test_ones_own_metric(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.py"
    own.write_text("def length(reference: str, answer: str) -> float:\n    return len(reference) / 100\n")
    model, dev = tiny_run["model"]["path"], tiny_run["data"]["dev"]
    words = ["--metrics", "loss", f"{own}:length", "--max-new-tokens", "4", "--data", dev]
    found = figures(capsys, model, *words)
    texts = [json.loads(line)["messages"][1]["content"] for line in Path(dev).read_text().splitlines()]
    assert found["metrics"][f"{own}:length"] == pytest.approx(sum(map(len, texts)) / len(texts) / 100)


def test_what_a_runs_config_names_is_executed_only_on_a_word(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's directory may come from anybody."""
    own, ran = tmp_path / "theirs.py", tmp_path / "ran"
    own.write_text(
        f"open({str(ran)!r}, 'a').close()\n"
        "def length(reference: str, answer: str) -> float:\n    return len(reference) / 100\n"
    )
    evaluate = {"where": "external", "patience": 0, "metrics": ["loss", f"{own}:length"]}
    run = trained(tiny_run, tmp_path, **evaluate)
    assert f"config.yaml: this run's config names code to execute: {own}:length (--trust, " in complaint(
        capsys, run
    )
    assert "--trust" in complaint(capsys, run, "--data", tiny_run["data"]["dev"])
    assert "--trust" in complaint(capsys, run, "--follow", "--once")
    assert figures(capsys, run, "--metrics", "loss", "--samples", "2")["metrics"] == {}
    assert not ran.exists()

    assert list(figures(capsys, run, "--trust", "--samples", "2")["metrics"]) == [f"{own}:length"]
    assert ran.exists()
    ran.unlink()
    assert main(["evaluate", str(run), "--follow", "--once", "--trust"]) == 0
    assert ran.exists()


def test_what_the_user_can_mend_is_one_line(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dev = Path(tiny_run["model"]["path"]), Path(tiny_run["data"]["dev"])
    broken = tmp_path / "broken.jsonl"
    broken.write_text(dev.read_text(encoding="utf-8") + '{"messages": [{"role": "user"\n', encoding="utf-8")
    assert "broken.jsonl:5" in complaint(capsys, model, "--data", broken)
    assert "exact_match?" in complaint(capsys, model, "--data", dev, "--metrics", "exat_match")
    assert "--data FILE.jsonl" in complaint(capsys, model)
    assert "nosuch/model" in complaint(capsys, "nosuch/model", "--data", dev)  # offline: no network is asked
    assert "--metrics loss exact_match" in complaint(
        capsys, model, "--data", dev, "--metrics", "loss", "--predictions", tmp_path / "p"
    )
    assert "config.yaml" in complaint(capsys, model, "--follow")
    assert "check PATH" in complaint(capsys, "nosuch", "--data", dev)
    assert "--json is not for --report" in complaint(capsys, model, "--report", "--json")
    assert "no such device" in complaint(capsys, model, "--data", dev, "--device", "cuda:77")


def test_a_run_is_followed_by_hand_and_reported_on(
    tiny_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], warm: Callable[..., Warm]
) -> None:
    """Training asks and ends; whoever follows afterwards answers; the page has all of it."""
    metrics = ["loss", "exact_match"]
    run = trained(tiny_run, tmp_path, where="external", patience=0, keep="all", metrics=metrics)
    done = warm("evaluate", str(run), "--follow").done()
    assert done.returncode == 0, done.stderr  # the run is finished: so is following it
    assert not done.stdout
    assert "step 14: evaluating" in done.stderr
    assert "step 14: loss " in done.stderr
    assert done.stderr.rstrip().endswith("to take these results over (it names the best)")
    assert {(one.step, one.status) for one in results(run)} == {(0, "done"), (7, "done"), (14, "done")}
    capfd.readouterr()
    assert main(["evaluate", str(run), "--report"]) == 0
    page = Path(capfd.readouterr().out.strip())
    assert page == run / "evals" / "report.md"
    text = page.read_text(encoding="utf-8")
    assert [f"| {step} |" in text for step in (0, 7, 14)] == [True] * 3
    assert "### Question 3" in text
    ElementTree.parse(run / "evals" / "report.svg")


def test_an_interrupted_follower_leaves_the_rest_to_others(
    tiny_run: dict[str, Any], tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    run = trained(tiny_run, tmp_path, where="external", patience=0)
    with (run / "events.jsonl").open("a") as log:
        log.write('{"time": 0.0, "kind": "start", "attempt": 2, "step": 14}\n')
    follower = warm("evaluate", str(run), "--follow")
    follower.read_until("step 14: loss")
    follower.send_signal(signal.SIGINT)  # it waits for more, as the run goes on
    said = follower.communicate(timeout=120)[1]
    assert follower.returncode == 75, said
    assert "Traceback" not in said
    exam_id = results(run)[0].exam_id
    post(run, Request(14, exam_id, 2, "checkpoints/checkpoint-14"))
    assert main(["evaluate", str(run), "--follow", "--once"]) == 0
    assert [one.status for one in results(run) if one.attempt == 2] == ["done"]


def test_a_share_of_the_training_data_is_held_out_everywhere(
    tiny_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by `data`, `plan` and `train`; trained, evaluated, gone on with; other shares are other data."""
    packed = tmp_path / "train.json.gz"
    rows = [json.loads(line) for line in Path(tiny_run["data"]["train"]).read_text().splitlines()]
    packed.write_bytes(gzip.compress(json.dumps(rows).encode()))
    said = {**tiny_run, "data": {**tiny_run["data"], "train": str(packed), "dev": "25%"}}
    told = ["held out", "25% of data.train, by content"]
    run = trained(said, tmp_path, where="inline", samples="all", metrics=["loss"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(word in out for word in told)
    found = figures(capsys, run)
    assert found["loss"] == pytest.approx({one.step: one.loss for one in results(run)}[14], rel=1e-5)
    held = found["total"]
    assert 0 < held < 22
    for verb in ("data", "plan"):
        assert main([verb, str(tmp_path / "my.yaml")]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert all(word in out for word in told), out
        assert f"{held} samples" in out
    more = ["train", str(tmp_path / "my.yaml"), "--run", str(run), "train.steps=16", "--accept", "schedule"]
    assert main([*more, "data.dev=5", "--accept", "config"]) == 2
    assert "data" in capsys.readouterr().err
    assert main(more) == 0
    assert figures(capsys, run)["total"] == held
