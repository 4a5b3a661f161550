"""What a run is made of is in the run, and what was refused has changed nothing on disk."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from glm_accelerate.assemble.model import open_model
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.cli.main import main
from glm_accelerate.config.load import load_config
from glm_accelerate.demo.tiny import Size, write_tiny
from glm_accelerate.evaluate.measuring.rebuild import glm_examiner
from glm_accelerate.export.export import export
from glm_accelerate.models import locate
from glm_accelerate.models.weights import load_model
from glm_accelerate.observe import sinks
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.mismatch import EVERY
from glm_accelerate.training.run import Result, train
from glm_accelerate.training.settle import Start
from tests.checkpoints import latest

Said = dict[str, Any]
TOKENS = torch.arange(12)[None]


@pytest.fixture
def go(tiny_run: Said, tmp_path: Path) -> Callable[..., Result]:
    """go(directory, *words, **start): four steps, saved at each second one while training waits."""
    said = {**tiny_run, "train": {"steps": 4, "step_samples": 4}, "checkpoint": {"every": 2, "wait": True}}
    said["data"] = {key: value for key, value in tiny_run["data"].items() if key != "dev"}
    del said["evaluate"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(said))

    def run(directory: str | Path, *words: str, stop_after: int | None = None, **start: Any) -> Result:
        config = load_config(tmp_path / "tiny.yaml", words)
        return train(config, directory, start=Start(**start), stop_after=stop_after)

    return run


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run; the lock's says only who held it last."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "lock"}


def logits(path: Path, **words: Any) -> torch.Tensor:
    with torch.no_grad():
        return open_model(path, **words).model(TOKENS)


def other_weights(model: Path, out: Path) -> Path:
    """The same shapes, other numbers."""
    shutil.copytree(model, out)
    tensors = {name: tensor * 1.5 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["adapt.alpha=64"], {}),
        (["model.path=OTHER"], {}),
        (["data.train=/nope.jsonl"], {}),
        (["data.train=/nope.jsonl"], {"resume": "never"}),
        ([], {"resume": "never", "init_from": Path("/nope/typo")}),
        (["model.path=NAN"], {"resume": "never"}),
    ],
)
def test_a_refused_start_has_changed_nothing(
    words: list[str], start: Said, go: Callable[..., Result], tiny_run: Said, tmp_path: Path
) -> None:
    run, model = tmp_path / "run", Path(tiny_run["model"]["path"])
    go(run)
    other, broken = other_weights(model, tmp_path / "other"), other_weights(model, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    before = content(run)
    with pytest.raises(UserError):
        go(
            run,
            *(word.replace("=OTHER", f"={other}").replace("=NAN", f"={broken}") for word in words),
            accept=EVERY,
            **start,
        )
    assert content(run) == before
    assert go(run).done


@pytest.mark.parametrize("word", ["observe.sinks=[swanlab]", "checkpoint.codec=zstd"])
def test_a_missing_package_is_named_before_anything_changes(
    word: str, go: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would train to its end and could save nothing."""
    run = tmp_path / "run"
    go(run)
    before = content(run)
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="is not installed"):
        go(run, word, accept=EVERY, resume="never")
    assert content(run) == before


def test_weights_are_never_opened_on_another_structure(
    go: Callable[..., Result], tiny_run: Said, tmp_path: Path
) -> None:
    """By hand changed, or by an older version: whoever opens the run compares it with its manifest."""
    run = tmp_path / "run"
    go(run, f"data.dev={tiny_run['data']['dev']}")
    other = other_weights(Path(tiny_run["model"]["path"]), tmp_path / "other")
    openers: list[Callable[[Path | None], object]] = [
        lambda base: open_model(run, base=base),
        lambda base: export(run, tmp_path / "out", merge_adapter=True, base=base),
        lambda base: glm_examiner(run, "cpu", base=base),  # before it claims anything
    ]
    for opener in openers:
        with pytest.raises(UserError, match=r"another model than .*config\.yaml builds.*--base") as caught:
            opener(other)
        assert str(run) in str(caught.value)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("alpha: 32.0", "alpha: 64.0"))
    for opener in openers:
        with pytest.raises(UserError, match=r"another adapt than its run's .*alpha 32.* alpha 64"):
            opener(None)


def test_a_run_begun_with_relative_paths_is_the_same_from_anywhere(
    go: Callable[..., Result], tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model.path=model", "data.train=train.jsonl", "data.dev=./dev.jsonl", "data.cache=cache"]
    go("run", *words, stop_after=2)
    here = logits(Path("run"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other_weights(tmp_path / "model", elsewhere / "model")
    monkeypatch.chdir(elsewhere)
    assert torch.equal(logits(tmp_path / "run"), here)
    glm_examiner(Path("../run"), "cpu")
    said = load_config("../run/config.yaml")
    local = [
        said.model.path,
        said.data.cache,
        *(one.path for one in [*said.data.train, *(said.data.dev or [])]),
    ]
    assert all(path.startswith(f"{tmp_path}/") for path in local), local
    monkeypatch.chdir(tmp_path)
    assert go(tmp_path / "run", *words).done  # the words of the first start still mean the same


def test_a_run_of_an_older_version_goes_on_from_its_directory(
    go: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.yaml has paths as they were typed."""
    monkeypatch.chdir(tmp_path)
    words = ["model.path=model", "data.train=train.jsonl", "data.cache=cache"]
    go("run", *words, stop_after=2)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(f"{tmp_path}/", ""))
    assert go("run", *words).done
    assert f"{tmp_path}/model" in config.read_text()


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_outlives_the_one_that_it_began_on(
    method: str,
    linked: bool,
    go: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other run's rotation deletes what --init-from named: the weights are in the run; in a chain too."""
    if not linked:  # as between two file systems
        monkeypatch.setattr(
            os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link"))
        )
    go(tmp_path / "first")
    go(tmp_path / "second", init_from=tmp_path / "first", stop_after=2)
    shutil.rmtree(tmp_path / "first")
    third = [f"adapt.method={method}"]
    go(tmp_path / "third", *third, init_from=tmp_path / "second", stop_after=2)
    go(tmp_path / "whole", *third, init_from=tmp_path / "second")
    assert go(tmp_path / "second").done
    shutil.rmtree(tmp_path / "second")
    (tmp_path / "third").rename(tmp_path / "moved")
    assert go(tmp_path / "moved", *third).done
    assert torch.equal(logits(tmp_path / "moved"), logits(tmp_path / "whole"))
    assert (tmp_path / "moved" / "base").exists() == (method == "lora")
    assert not list((tmp_path / "moved").rglob("base/**/optimizer*"))
    export(tmp_path / "moved", tmp_path / "out", merge_adapter=True)


def test_never_moves_aside_once_the_start_is_sound(go: Callable[..., Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(run)
    go(run, resume="never", stop_after=1)
    assert {path.name for path in (run / "abandoned").iterdir()} >= {"checkpoint-2", "checkpoint-4"}
    said = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("[2, 4] are in abandoned/" in event.get("said", "") for event in said)
    shutil.rmtree(run / "checkpoints")  # as if killed before the first save
    with pytest.raises(UserError, match=r"all in abandoned/.*--resume never"):
        go(run)
    assert go(run, resume="never").done


def test_a_damaged_plan_or_name_is_made_anew(go: Callable[..., Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(run, stop_after=2)
    for junk in (b"", b'{"ranks": 1', b"\xff\xfe", b"[]"):
        (run / "plan.json").write_bytes(junk)
        (run / "run_id").write_bytes(junk)
        with pytest.raises(UserError, match=r"plan\.json: damaged.*train"):
            glm_examiner(run, "cpu")
        assert go(run).done
        assert json.loads((run / "plan.json").read_text())["steps"] == 4


@pytest.fixture
def adapter(go: Callable[..., Result], tmp_path: Path) -> Path:
    """Rank 4, alpha 32, as a run has left it."""
    go(tmp_path / "first", stop_after=2)
    return export(tmp_path / "first", tmp_path / "adapter", merge_adapter=False).path


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"lora_alpha": 16}, "adapt.rank=4 adapt.alpha=16"),
        ({"use_rslora": True}, "adapt.rank=4 adapt.alpha=64"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern cannot be read"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern cannot be read"),
    ],
)
def test_an_adapter_is_begun_on_with_its_own_scale_alone(
    change: Said, cure: str, adapter: Path, go: Callable[..., Result], tmp_path: Path
) -> None:
    """The scale is in the config, which every later start and every opener reads."""
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(UserError, match=cure):
        go(tmp_path / "second", init_from=adapter)
    assert not (tmp_path / "second" / "config.yaml").exists()
    if "adapt.alpha" in cure:
        assert go(tmp_path / "second", cure.split()[1], init_from=adapter, stop_after=1)
        assert go(tmp_path / "second", cure.split()[1]).done
    for words in (["adapt.rank=8"], ["adapt.method=full"], ["adapt.method=prefix"]):
        with pytest.raises(UserError, match="adapter"):
            go(tmp_path / "third", *words, init_from=adapter)


def test_a_stock_checkpoint_goes_on_without_its_moments(
    adapter: Path, go: Callable[..., Result], tmp_path: Path
) -> None:
    """None there, others, or damaged ones removed as the message says: the optimizer begins anew."""
    (adapter / "trainer_state.json").write_text(json.dumps({"global_step": 2, "max_steps": 4}))
    moments = adapter / "optimizer.pt"
    for number, (kept, note) in enumerate([(None, "no optimizer.pt"), ({"state": {}}, "does not match")]):
        if kept is not None:
            torch.save({"param_groups": [{"params": []}], **kept}, moments)
        run = tmp_path / f"run-{number}"
        assert go(run, "adapt.targets=all-linear", resume=str(adapter)).done
        events = read_events(run / "events.jsonl")
        said = [str(event["said"]) for event in events if event["kind"] == "warning"]
        assert sum(note in one and "the optimizer begins anew" in one for one in said) == 1
        assert [event["step"] for event in events if event["kind"] == "step"] == [3, 4]
        assert go(run).done  # its own checkpoints have moments
    moments.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"remove optimizer\.pt to go on with the weights alone"):
        go(tmp_path / "run", resume=str(adapter))


def test_weights_of_another_kind_are_not_begun_on(
    go: Callable[..., Result], tiny_run: Said, tmp_path: Path
) -> None:
    """The plan and the data are for model.path: other sizes, or other words, would be trained on nonsense."""
    model = Path(tiny_run["model"]["path"])
    wider = write_tiny(
        tmp_path / "wider",
        ["Say", "in", "German"],
        size=Size(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48),
    )
    words = other_weights(model, tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    (words / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"vocabulary \d+, not \d+, width 64, not 32.*model\.path="):
        go(run, init_from=wider)
    with pytest.raises(UserError, match=r"another model than model\.path: another tokenizer"):
        go(run, init_from=words)
    go(tmp_path / "wide", f"model.path={wider}", stop_after=2)
    with pytest.raises(UserError, match=r"the model of .*wide.*width 64, not 32"):
        go(run, init_from=tmp_path / "wide")
    assert not (run / "config.yaml").exists()


def test_the_adapter_names_its_base_as_the_user_did(
    adapter: Path, go: Callable[..., Result], tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local model by its absolute path, a hub's by its name; so the adapter is opened without --base."""
    named = "base_model_name_or_path"
    assert json.loads((adapter / "adapter_config.json").read_text())[named] == tiny_run["model"]["path"]
    assert torch.equal(logits(adapter), logits(tmp_path / "first"))
    again = export(adapter, tmp_path / "again", merge_adapter=False).path
    assert json.loads((again / "adapter_config.json").read_text())[named] == tiny_run["model"]["path"]
    monkeypatch.setattr(locate, "_from_hugging_face", lambda name: Path(tiny_run["model"]["path"]))
    go(tmp_path / "hub", "model.path=THUDM/tiny", stop_after=2)
    out = export(tmp_path / "hub", tmp_path / "out", merge_adapter=False).path
    assert json.loads((out / "adapter_config.json").read_text())[named] == "THUDM/tiny"
    assert load_config(tmp_path / "hub" / "config.yaml").model.path == "THUDM/tiny"
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**said, named: "tiny"}))
    with pytest.raises(UserError, match=r"tiny: the model that the adapter was trained on.*--base"):
        open_model(adapter)


def test_an_adapter_on_another_runs_weights_is_exported_merged_alone(
    go: Callable[..., Result], tmp_path: Path
) -> None:
    go(tmp_path / "first", stop_after=2)
    go(tmp_path / "second", init_from=tmp_path / "first", stop_after=2)
    with pytest.raises(UserError, match=r"another run's weights.*--merge"):
        export(tmp_path / "second", tmp_path / "out", merge_adapter=False)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "second", tmp_path / "out", merge_adapter=True)


def spoil(run: Path, step: int, *, group: str) -> None:
    """The checkpoint of a step once more, with one NaN in it, as the saver writes it: flagged."""
    path = run / "checkpoints" / f"checkpoint-{step}"
    reader = Reader(path)
    groups = {
        name: {k: part_of(t) for k, t in reader.group(name).items()} for name in ("weights", "optimizer")
    }
    next(one for one in groups[group].values() if one.local.ndim).local.view(-1)[0] = float("nan")
    manifest, state = reader.manifest, reader.state()
    shutil.rmtree(path)
    again = Checkpointer(run, run_id=manifest.run)
    again.save(Save(step, 1, groups, state, manifest.fingerprints, manifest.facts))
    assert [outcome.error for outcome in again.outcomes()] == [None]
    assert Reader(path).manifest.facts["nonfinite"]


@pytest.mark.parametrize("group", ["weights", "optimizer"])
def test_what_is_not_finite_is_never_gone_on_from(
    group: str, go: Callable[..., Result], tmp_path: Path
) -> None:
    """Nor where the newest turns out damaged only when its bytes are read."""
    run = tmp_path / "run"
    go(run, "train.steps=3", "checkpoint.every=1")
    spoil(run, 2, group=group)
    newest = run / "checkpoints" / "checkpoint-3" / "weights-0-of-1.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    found, reasons = latest(run)
    assert found is not None
    assert found.name == "checkpoint-1"
    assert ["checkpoint-3" in reasons[0], "checkpoint-2" in reasons[-1]] == [True, True]
    with pytest.raises(UserError, match="checkpoint-2: its weights or moments are not finite"):
        go(run, "train.steps=3", "checkpoint.every=1", resume="2")
    assert go(run, "train.steps=3", "checkpoint.every=1").done
    said = (run / "events.jsonl").read_text()
    assert "checkpoint-2: its weights or moments are not finite" in said
    assert [event["step"] for event in read_events(run / "events.jsonl") if event["kind"] == "resume"] == [1]


def test_weights_that_are_not_finite_are_not_exported(
    go: Callable[..., Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    go(run)
    spoil(run, 4, group="weights")
    for merge in (True, False):
        with pytest.raises(UserError, match=r"not finite.*name another checkpoint"):
            export(run / "checkpoints" / "checkpoint-4", tmp_path / "out", merge_adapter=merge)
    assert not (tmp_path / "out").exists()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "step 2" in told
    assert "passed over" in told
    assert "checkpoint-4: its weights or moments are not finite" in told


def test_a_full_run_is_opened_as_wide_as_it_is_exported(
    go: Callable[..., Result], tiny_run: Said, tmp_path: Path
) -> None:
    """Where its evaluations multiply in bfloat16, too; master weights stay float32 in a float32 run."""
    model = Path(tiny_run["model"]["path"])
    said = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**said, "torch_dtype": "bfloat16"}))
    for compute in ("float32", "bfloat16"):
        run = tmp_path / compute
        go(run, "adapt.method=full", f"precision.compute={compute}", stop_after=2)
        opened = open_model(run, merged=True).model
        assert {p.dtype for p in opened.parameters()} == {getattr(torch, compute)}
        out = export(run, tmp_path / f"{compute}-out", merge_adapter=False).path
        kept = open_model(run, dtype=torch.float32, merged=True).model
        served = load_model(out)
        for name, weight in served.named_parameters():
            assert torch.equal(weight, kept.get_parameter(name).bfloat16()), name


def test_run_that_was_planned_without_held_out_data_says_so(
    go: Callable[..., Result], tiny_run: Said, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    go(run, stop_after=2)
    text = (
        (run / "config.yaml").read_text().replace("dev: null", f"dev: [{{path: {tiny_run['data']['dev']}}}]")
    )
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"planned without held-out data.*--data"):
        glm_examiner(run, "cpu")
