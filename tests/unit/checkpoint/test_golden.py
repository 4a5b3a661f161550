"""Checkpoints of every schema that there has been stay readable. They were written once and are kept.

schema-1        by the code of schema 1: three steps of the `tiny_run` fixture (LoRA), 2026-11-21
schema-2*       the same tensors, written by the first code of schema 2: plain, zstd (weights only), two ranks
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm_accelerate.assemble.model import open_model
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.demo.tiny import Size, write_tiny
from tests.checkpoints import verify

GOLDEN = Path(__file__).parents[2] / "golden"
CHECKPOINT = Path("checkpoints") / "checkpoint-3"
FIRST = GOLDEN / "schema-1" / CHECKPOINT
SIZE = Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
WORDS = ["red", "green", "blue", "white", "black", "sky", "rot", "gruen", "blau", "weiss", "schwarz", "天空"]


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_it_reads(name: str) -> None:
    if name.endswith("zstd"):
        pytest.importorskip("zstandard")
    directory = GOLDEN / name / CHECKPOINT
    manifest = verify(directory)
    assert manifest.schema == int(name.split("-")[1])
    assert (manifest.step, manifest.attempt) == (3, 1)
    assert manifest.facts == {"loss": 5.871847401062648, "method": "lora", "template": "glm4-0414"}
    reader = Reader(directory)
    assert reader.state() == json.loads((FIRST / "state.json").read_text())
    for group in manifest.tensors:
        wanted = load_file(FIRST / f"{group}.safetensors")
        assert len(wanted) in (24, 72)
        found = reader.group(group)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
        for key, tensor in wanted.items():
            if tensor.ndim == 2:
                region = reader.tensor(group, key, (1, 1), (tensor.shape[0] - 2, tensor.shape[1] - 1))
                assert torch.equal(region, tensor[1:-1, 1:])
    assert set(manifest.tensors) == ({"weights"} if name.endswith("zstd") else {"weights", "optimizer"})


@pytest.mark.parametrize("name", ["schema-1", "schema-2"])
def test_its_model_opens(name: str, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "model", [*WORDS, "Say", "in", "German", "and", "the", "words"], size=SIZE)
    opened = open_model(GOLDEN / name, base=base)
    assert (opened.step, opened.template, opened.base) == (3, "glm4-0414", base)
    weights = load_file(FIRST / "weights.safetensors")
    there = dict(opened.model.named_parameters())
    assert all(torch.equal(there[key], tensor) for key, tensor in weights.items())
    reader = Reader(GOLDEN / name / CHECKPOINT)
    assert reader.state()["position"] == 3
    assert reader.group("weights").keys() == weights.keys()
    assert len(reader.group("optimizer")) == 72


def test_schema_1_is_verified_when_it_is_read(tmp_path: Path) -> None:
    """It has digests of whole files only."""
    for place in (0, 20, -1):
        broken = tmp_path / str(place)
        broken.mkdir()
        for file in FIRST.iterdir():
            content = bytearray(file.read_bytes())
            if file.name == "weights.safetensors":
                content[place] ^= 1
            (broken / file.name).write_bytes(content)
        with pytest.raises(ValueError, match=r"weights.safetensors is damaged"):
            Reader(broken).group("weights")
