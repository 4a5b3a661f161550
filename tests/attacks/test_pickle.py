"""Pickles that run code when they are opened: `convert` refuses them in one line, and no canary is left."""

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.pickled import unpickle
from glm_accelerate.export.convert import convert
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.errors import UserError


class Bomb:
    """Its unpickling writes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


class Evaluated(Bomb):
    """The same through Python itself."""

    def __reduce__(self):
        return eval, (f"open({str(self.canary)!r}, 'w').close()",)


class Call(Bomb):
    """The same through a name that looks like one of torch's."""

    def __reduce__(self):
        return torch.utils.data.get_worker_info.__globals__["os"].mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def source(make_model) -> Path:
    directory = make_model("chatglm")
    (directory / "model.safetensors").unlink()
    return directory


@pytest.mark.parametrize("bomb", [Bomb, Evaluated, Call])
def test_the_bombs_are_real(bomb, canary):
    pickle.loads(pickle.dumps(bomb(canary)))
    assert canary.exists()


@pytest.mark.parametrize("bomb", [Bomb, Evaluated, Call])
@pytest.mark.parametrize("form", ["raw", "old", "zip", "beside a tensor"])
def test_no_pickle_is_run(bomb, form, canary, tmp_path):
    shard = tmp_path / "pytorch_model.bin"
    if form == "raw":
        shard.write_bytes(pickle.dumps({"weight": bomb(canary)}))
    elif form == "old":
        torch.save({"weight": bomb(canary)}, shard, _use_new_zipfile_serialization=False)
    elif form == "zip":
        torch.save({"weight": bomb(canary)}, shard)
    else:
        torch.save({"a": torch.ones(3), "weight": bomb(canary), "z": torch.ones(3)}, shard)
    with pytest.raises(UserError, match="refused") as caught:
        unpickle("weights", shard, tmp_path / "out.safetensors")
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)  # no advice to trust it
    assert not canary.exists()
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.process
def test_the_whole_verb_refuses_in_one_line(source, canary, tmp_path):
    torch.save({"weight": Bomb(canary)}, source / "pytorch_model.bin")
    words = [sys.executable, "-m", "glm_accelerate.cli.main", "convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "pytorch_model.bin: refused: it asks for posix.system" in line
    assert not canary.exists()
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_a_module_beside_the_weights_is_not_imported(source, canary, tmp_path, monkeypatch):
    """`cd` into a downloaded directory and convert it: its own torch.py is not ours."""
    torch.save({"weight": torch.ones(3)}, source / "pytorch_model.bin")
    for name in ("torch", "json", "safetensors", "glm_accelerate"):
        (source / f"{name}.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.chdir(source)
    convert(source, tmp_path / "out")
    assert not canary.exists()


def test_a_small_file_cannot_ask_for_all_memory(tmp_path):
    torch.save({"weight": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="claims to be larger"):
        unpickle("weights", tmp_path / "pytorch_model.bin", tmp_path / "out.safetensors")


def test_a_zip_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("../../escape", "x")
    with pytest.raises(UserError, match="not a whole file of tensors"):
        unpickle("weights", tmp_path / "pytorch_model.bin", tmp_path / "out.safetensors")


def test_nothing_else_opens_pickles(source, canary):
    torch.save({"weight": Bomb(canary)}, source / "pytorch_model.bin")
    with pytest.raises(UserError, match="never opened"):
        load_model(source)
    assert not canary.exists()
