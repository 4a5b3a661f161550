"""A model that shares and factors matrices: trained by the command line, resumed, exported both ways."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from glm_accelerate.assemble.model import open_model
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config, override
from glm_accelerate.config.schema import AdaptSection, RunConfig
from glm_accelerate.export.export import export
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.structure import expand, structure_of
from glm_accelerate.models.weights import load_model, part_reader
from glm_accelerate.models.write import save_model
from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.run import train

Said = dict[str, Any]
TOKENS = torch.randint(0, 60, (2, 23), generator=torch.Generator().manual_seed(0))


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "glm_accelerate.cli.main", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(run / "checkpoints" / f"checkpoint-{step}")
    return {**reader.group("weights"), **reader.group("optimizer")}


@pytest.fixture
def said(tiny_run: Said, tmp_path: Path) -> Path:
    """A config of 6 steps; its shapes are so small that only ranks of 16 save anything."""
    tiny_run["adapt"] = {"method": "full", "share_qk": 2, "keep_energy": 0.6}
    tiny_run["train"] = {"steps": 6, "step_samples": 4}
    tiny_run["evaluate"] = {"metrics": ["loss"], "every": 6}
    tiny_run["checkpoint"] = {"every": 3, "wait": True}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_run))
    return path


def test_trained_resumed_and_exported_both_ways(said: Path, tiny_run: Said, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    made = command("train", said, "--run", straight)
    assert made.returncode == 0, made.stderr
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoints" / "checkpoint-6")  # as if killed before it
    made = command("train", said, "--run", run)
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
    assert structure_of(again) == structure_of(ours)
    with torch.no_grad():
        logits = ours(TOKENS)
        assert float((theirs(TOKENS).logits - logits).abs().max() / logits.abs().max()) < 1e-5
        assert torch.equal(again(TOKENS), logits)
    sizes = [(out / "model.safetensors").stat().st_size for out in (as_is, plain)]
    assert sizes[0] < sizes[1]
    with pytest.raises(ValueError, match="glm-accelerate"):  # nobody opens it by mistake
        AutoModelForCausalLM.from_pretrained(as_is)

    # What was exported as it is, is a model like any other: it trains on, whole.
    on = {**tiny_run, "model": {"path": str(as_is)}, "adapt": {"method": "full"}}
    assert train(RunConfig.model_validate(on), tmp_path / "on").done
    assert structure_of(open_model(tmp_path / "on").model) == structure_of(ours)
    with pytest.raises(UserError, match="only trains whole"):
        train(RunConfig.model_validate({**on, "adapt": {"method": "lora"}}), tmp_path / "lora")


def test_another_structure_is_another_run(said: Path, tmp_path: Path) -> None:
    config = load_config(said, ["train.steps=2"])
    assert train(config, tmp_path / "run").done
    with pytest.raises(UserError, match="adapt"):
        train(override(config, ["adapt.share_qk=1"]), tmp_path / "run")


def test_saving_says_what_it_needs(said: Path, tiny_run: Said, tmp_path: Path) -> None:
    model = load_model(tiny_run["model"]["path"])
    adapt(model, AdaptSection(method="full", share_qk=2))
    with pytest.raises(UserError, match="shares or factors"):
        save_model(model, tmp_path / "out")
    save_model(model, tmp_path / "as-is", layout="structured")
    read = part_reader(load_model(tmp_path / "as-is", device="meta"))  # as ranks that divide it do
    whole = model.get_parameter("layers.0.self_attn.q_proj.weight")
    assert torch.equal(read("layers.0.self_attn.q_proj.weight", (1, 0), (5, whole.shape[1])), whole[1:6])
    assert json.loads((tmp_path / "as-is" / "config.json").read_text())["structure"]["share_qk"] == 2
    expand(model)
    save_model(model, tmp_path / "expanded")
    with torch.no_grad():
        assert torch.allclose(
            load_model(tmp_path / "expanded")(TOKENS), load_model(tmp_path / "as-is")(TOKENS)
        )
