"""A run's model in another process finds what the trainer's own finds, whatever is trained."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from glm_accelerate.assemble.tensors import put
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.measuring.rebuild import glm_examiner
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.messages import Request
from glm_accelerate.export.compress import compress
from glm_accelerate.export.export import export
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train

Said = dict[str, Any]
KINDS: dict[str, Said] = {
    "lora": {"method": "lora", "rank": 4},
    "freeze": {"method": "freeze", "layers": 1},
    "prefix": {"method": "prefix", "prefix_tokens": 4},
    "full": {"method": "full"},
    "int8": {"method": "lora", "rank": 4, "base": "int8"},
}


def trained(tiny_run: Said, tmp_path: Path, adapt: Said, evaluate: Said | None = None) -> Path:
    """Four steps, evaluated and saved at the second and the fourth while training waits."""
    said = {
        **tiny_run,
        "adapt": adapt,
        "train": {"steps": 4, "step_samples": 4},
        "evaluate": {**tiny_run["evaluate"], "every": 2, "where": "inline", **(evaluate or {})},
        "checkpoint": {"every": 2, "wait": True},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(said))
    train(load_config(tmp_path / "config.yaml"), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_the_trainers_own(kind: str, tiny_run: Said, tmp_path: Path) -> None:
    run = trained(tiny_run, tmp_path, KINDS[kind])
    inline = {said.step: said for said in ledger.results(run)}
    examiner = glm_examiner(run, "cpu")
    for step in (4, 2):
        assert inline[step].exam_id == examiner.exam_id
        request = Request(step, examiner.exam_id, 1, f"checkpoints/checkpoint-{step}")
        found = examiner.examine(request, str(run), None).result
        assert inline[step].loss is not None
        assert found.loss == pytest.approx(inline[step].loss, rel=1e-6)
        assert found.metrics == inline[step].metrics
    assert inline[2].loss != inline[4].loss
    assert found.by["device"] == "cpu"


def test_of_a_compressed_base_too(tiny_run: Said, tmp_path: Path) -> None:
    smaller = partial(compress, share_qk=2, keep_energy=0.6)
    base = Path(tiny_run["model"]["path"])
    export(base, tmp_path / "base", merge_adapter=True, layout="structured", change=smaller)
    tiny_run["model"] = {"path": str(tmp_path / "base")}
    test_the_same_as_the_trainers_own("full", tiny_run, tmp_path)


def test_what_was_trained_on_need_not_be_there(tiny_run: Said, tmp_path: Path) -> None:
    """An evaluator elsewhere has the run, the model and the held-out samples."""
    run = trained(tiny_run, tmp_path, KINDS["lora"])
    Path(tiny_run["data"]["train"]).unlink()
    assert glm_examiner(run, "cpu").exam_id == ledger.results(run)[0].exam_id


def test_precision_is_as_asked_and_its_difference_is_told(tiny_run: Said, tmp_path: Path) -> None:
    run = trained(tiny_run, tmp_path, KINDS["full"], {"precision": "bfloat16", "metrics": ["loss"]})
    examiner = glm_examiner(run, "cpu")
    assert examiner.model.compute == torch.bfloat16
    request = Request(4, examiner.exam_id, 1, "checkpoints/checkpoint-4")
    found = examiner.examine(request, str(run), None).result
    assert found.by["dtype"] == "bfloat16"
    assert abs(float(found.by["float32 differs by"])) < 0.1
    full = {said.step: said for said in ledger.results(run)}[4].loss
    assert found.loss == pytest.approx(full, abs=0.05)


def test_a_layer_that_float16_cannot_hold_is_evaluated_all_the_same(tiny_run: Said, tmp_path: Path) -> None:
    """The trainer measures such layers and widens them; an evaluator computes all of them wide."""
    file = Path(tiny_run["model"]["path"]) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.gate_up_proj.weight"] *= 1000.0
    save_file(weights, file, metadata={"format": "pt"})
    run = trained({**tiny_run, "precision": {"compute": "float16"}}, tmp_path, KINDS["lora"])
    examiner = glm_examiner(run, "cpu")
    request = Request(4, examiner.exam_id, 1, "checkpoints/checkpoint-4")
    found = examiner.examine(request, str(run), None).result
    assert found.by["dtype"] == "float32"
    inline = {said.step: said for said in ledger.results(run)}[4]
    assert inline.loss is not None
    assert found.loss == pytest.approx(inline.loss, abs=0.01)


def test_what_does_not_fit_is_named(tiny_run: Said, tmp_path: Path) -> None:
    run = trained(tiny_run, tmp_path, KINDS["lora"])
    snapshot = run / "checkpoints" / "checkpoint-4"
    with pytest.raises(UserError, match=r"no plan\.json here"):
        glm_examiner(tmp_path, "cpu")
    examiner = glm_examiner(run, "cpu")
    next(iter(examiner.model.parameters())).requires_grad_(True)
    with pytest.raises(UserError, match="trains other tensors"):
        put(examiner.model, Reader(snapshot), snapshot)
    model = glm_examiner(run, "cpu").model
    narrow = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    narrow.data = narrow.data[:1]
    with pytest.raises(UserError, match=r"this config wants \["):
        put(model, Reader(snapshot), snapshot)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("rank: 4", "rank: 2"))
    with pytest.raises(UserError, match="another adapt than its run's"):
        glm_examiner(run, "cpu")
