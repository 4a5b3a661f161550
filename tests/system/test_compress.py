"""A compressed base: written by the verb, trained by the command line, resumed, exported both ways."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from glm_accelerate.assemble.model import open_model
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.export.compress import compress
from glm_accelerate.export.export import export
from glm_accelerate.models.sizes import MODEL_TYPE
from glm_accelerate.models.weights import load_model, part_reader, read_config
from glm_accelerate.models.write import save_model
from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train
from tests.warm import Warm

Said = dict[str, Any]
TOKENS = torch.randint(0, 60, (2, 23), generator=torch.Generator().manual_seed(0))


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(warm: Callable[..., Warm]) -> Command:
    return lambda *words: warm(*map(str, words)).done()


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(run / "checkpoints" / f"checkpoint-{step}")
    return {**reader.group("weights"), **reader.group("optimizer")}


@pytest.fixture
def smaller(tiny_run: Said, tmp_path: Path) -> Path:
    """Its shapes are so small that only ranks of 16 save anything."""
    out, change = tmp_path / "smaller", partial(compress, share_qk=2, keep_energy=0.6)
    export(Path(tiny_run["model"]["path"]), out, merge_adapter=True, layout="structured", change=change)
    return out


@pytest.fixture
def said(tiny_run: Said, smaller: Path) -> Said:
    return {
        **tiny_run,
        "model": {"path": str(smaller)},
        "train": {"steps": 6, "step_samples": 4},
        "evaluate": {"metrics": ["loss"], "every": 6},
        "checkpoint": {"every": 3, "wait": True},
    }


def test_the_verb_writes_it(smaller: Path, tiny_run: Said, tmp_path: Path, command: Command) -> None:
    words = ("compress", tiny_run["model"]["path"], tmp_path / "out")
    made = command(*words, "--share-qk", 2, "--keep-energy", 0.6)
    assert made.returncode == 0, made.stderr
    assert "each 2 layers share queries and keys" in made.stdout
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (smaller / file).read_bytes()
    made = command(*words)
    assert made.returncode == 2
    assert "exists already" in made.stderr


def test_trained_resumed_and_exported_both_ways(said: Said, tmp_path: Path, command: Command) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump({**said, "adapt": {"method": "full"}}))
    run, straight = tmp_path / "run", tmp_path / "straight"
    made = command("train", config, "--run", straight)
    assert made.returncode == 0, made.stderr
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoints" / "checkpoint-6")  # as if killed before it
    made = command("train", config, "--run", run)
    assert made.returncode == 0, made.stderr
    assert any(e["kind"] == "resume" and e["step"] == 3 for e in read_events(run / "events.jsonl"))
    one, other = state(run, 6), state(straight, 6)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)  # resumed bit for bit
    assert "layers.0.self_attn.k_proj.weight" in one or "layers.0.self_attn.k_proj.inner.weight" in one
    assert not any(name.startswith("layers.1.self_attn.k_proj") for name in one)
    assert any(name.endswith(".inner.weight::exp_avg") for name in one)

    ours = open_model(run).model
    plain, as_is = tmp_path / "plain", tmp_path / "as-is"
    export(run, plain, merge_adapter=False)
    made = command("export", run, as_is, "--layout", "structured")
    assert made.returncode == 0, made.stderr
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    again = load_model(as_is, dtype=torch.float32)
    assert again.sizes == ours.sizes
    with torch.no_grad():
        logits = ours(TOKENS)
        assert float((theirs(TOKENS).logits - logits).abs().max() / logits.abs().max()) < 1e-5
        assert torch.equal(again(TOKENS), logits)
    sizes = [(out / "model.safetensors").stat().st_size for out in (as_is, plain)]
    assert sizes[0] < sizes[1]
    with pytest.raises(ValueError, match=MODEL_TYPE):  # nobody opens it by mistake
        AutoModelForCausalLM.from_pretrained(as_is)


@pytest.mark.parametrize(
    "adapt",
    [
        {"method": "lora", "rank": 4},
        {"method": "lora", "rank": 4, "base": "nf4"},
        {"method": "prefix", "prefix_tokens": 4},
        {"method": "freeze", "layers": 1},
    ],
    ids=["lora", "qlora", "prefix", "freeze"],
)
def test_it_trains_by_every_method(adapt: Said, said: Said, smaller: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(RunConfig.model_validate({**said, "adapt": adapt}), run).done
    opened = open_model(run, dtype=torch.float32)
    assert opened.model.sizes == read_config(smaller)[1]
    logits = opened.model(TOKENS).detach()
    assert logits.isfinite().all()
    assert not torch.equal(logits, load_model(smaller, dtype=torch.float32)(TOKENS))
    if adapt["method"] == "lora":  # one adapter for what is shared, so that it stays shared
        export(run, tmp_path / "merged", merge_adapter=True, layout="structured", dtype=torch.float32)
        export(run, tmp_path / "plain", merge_adapter=True, dtype=torch.float32)
        for out in ("merged", "plain"):
            found = load_model(tmp_path / out)(TOKENS)
            assert float((found - logits).abs().max() / logits.abs().max()) < 1e-4


def test_keys_of_before_name_the_verb(tiny_run: Said, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump({**tiny_run, "adapt": {"share_qk": 2, "keep_energy": 0.6}}))
    with pytest.raises(UserError, match=r"compress MODEL NEW --share-qk 2 --keep-energy 0\.6"):
        load_config(config)
    config.write_text(yaml.safe_dump({**tiny_run, "adapt": {"share_qk": 1, "keep_energy": 1.0}}))
    assert load_config(config).adapt.method == "lora"  # as config.yaml of an older run has them


def test_saving_names_the_layout_that_it_needs(smaller: Path, tmp_path: Path) -> None:
    model = load_model(smaller)
    with pytest.raises(UserError, match="shares or factors"):
        save_model(model, tmp_path / "out")
    read = part_reader(load_model(smaller, device="meta"))  # as ranks that divide it do
    name = next(name for name, _ in model.named_parameters() if name.endswith(".inner.weight"))
    whole = model.get_parameter(name)
    assert torch.equal(read(name, (1, 0), (5, whole.shape[1])), whole[1:6])
    assert json.loads((smaller / "config.json").read_text())["structure"]["share_qk"] == 2
