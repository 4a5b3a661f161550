"""Pickled weights become safetensors: the same tensors, one shard at a time, nothing unless all of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm_accelerate.checkpoint.pickled import unpickle
from glm_accelerate.export import convert as module
from glm_accelerate.export.convert import convert
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.errors import UserError


def pickled(directory: Path, shards: int) -> dict[str, torch.Tensor]:
    """The model's weights as pytorch_model*.bin; the safetensors are gone."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = list(weights)
    parts = [names[number::shards] for number in range(shards)]
    files = [f"pytorch_model-{n + 1:05}-of-{shards:05}.bin" for n in range(shards)]
    files = files if shards > 1 else ["pytorch_model.bin"]
    for file, part in zip(files, parts, strict=True):
        torch.save({name: weights[name] for name in part}, directory / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part}}
        (directory / module.OLD_INDEX).write_text(json.dumps(index))
    return weights


@pytest.fixture
def in_this_process(monkeypatch):
    """Children cost a second each; tests/system has the real ones."""
    monkeypatch.setattr(
        module, "unpickle_apart", lambda kind, pickled, target, _: unpickle(kind, pickled, target)
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_the_same_model(make_model, tmp_path, shards, in_this_process):
    source = make_model("chatglm", dtype=torch.float16)
    wanted = load_model(source)
    weights = pickled(source, shards)
    (source / "tokenizer.model").write_bytes(b"words")
    (source / "modeling_chatglm.py").write_text("raise SystemExit('was run')\n")
    seen: list[tuple[int, int]] = []
    made = convert(source, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert made.tensors == len(weights)
    assert made.bytes == sum(tensor.numel() * 2 for tensor in weights.values())
    got = load_model(made.path)
    for (name, mine), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert mine.dtype == torch.float16, name
        assert torch.equal(mine, other), name
    assert (made.path / "tokenizer.model").read_bytes() == b"words"
    assert (made.path / "modeling_chatglm.py").is_file()
    assert not list(made.path.glob("*.bin*"))
    assert len(seen) == shards
    assert seen[-1][0] == seen[-1][1]


def test_a_bad_shard_leaves_nothing(make_model, tmp_path, in_this_process):
    source = make_model("chatglm")
    pickled(source, 3)
    last = source / "pytorch_model-00003-of-00003.bin"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(UserError, match="refused"):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_what_is_not_there_to_convert(make_model, tmp_path):
    source = make_model("chatglm")
    with pytest.raises(UserError, match="has safetensors already"):
        convert(source, tmp_path / "out")
    pickled(source, 3)
    (source / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(UserError, match=r"shard pytorch_model-00002-of-00003\.bin is missing"):
        convert(source, tmp_path / "out")
    (source / module.OLD_INDEX).write_text('{"weight_map": {"a": "../../elsewhere.bin"}}')
    with pytest.raises(UserError, match="outside its directory"):
        convert(source, tmp_path / "out")
    (source / module.OLD_INDEX).write_text('{"weight_map": [1]}')
    with pytest.raises(UserError, match="not an index"):
        convert(source, tmp_path / "out")
    (source / module.OLD_INDEX).unlink()
    for path in source.glob("*.bin"):
        path.unlink()
    with pytest.raises(UserError, match=r"no pytorch_model\*\.bin"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_share_storage(tmp_path):
    weight = torch.randn(4, 5)
    state = {"a": weight, "b": weight, "c": weight.t(), "d": weight[1:]}
    torch.save(state, tmp_path / "shared.bin")
    unpickle("weights", tmp_path / "shared.bin", tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], state[name]) for name in state)
