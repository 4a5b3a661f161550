"""A checkpoint exists or it does not; damage of any byte is found and named."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.format import (
    Damaged,
    File,
    Span,
    Stored,
    read_manifest,
    require_whole,
    step_of,
)
from glm_accelerate.runtime.errors import UserError
from tests.checkpoints import save, verify, write_manifest

Make = Callable[[int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(step: int) -> Path:
        draw = torch.Generator().manual_seed(step)
        return save(
            tmp_path,
            step,
            1,
            weights={"a": torch.randn(5, 3, generator=draw), "b": torch.ones(4).bfloat16()},
            optimizer={"a::step": torch.tensor(3.0), "a::exp_avg": torch.randn(5, 3, generator=draw)},
            state={"position": step},
            fingerprints={"data": "d"},
            facts={"template": "glm4", "loss": None},
        ).path

    return make


def test_modes_names_and_no_place(make: Make, tmp_path: Path) -> None:
    path = make(7)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(
        (
            "manifest.json",
            "manifest.sha256",
            "state.json",
            "weights-0-of-1.safetensors",
            "optimizer-0-of-1.safetensors",
        ),
        0o600,
    )
    pointer = tmp_path / "checkpoints" / "latest"
    assert pointer.read_text() == "checkpoint-7\n"
    assert pointer.stat().st_mode & 0o777 == 0o600
    assert str(tmp_path) not in "".join(file.read_text("latin-1") for file in path.iterdir())


def test_the_manifest_says_what_was_saved(make: Make) -> None:
    manifest = read_manifest(make(7))
    assert (manifest.step, manifest.attempt, manifest.ranks, manifest.codec, manifest.schema) == (
        7,
        1,
        1,
        "none",
        2,
    )
    assert manifest.fingerprints == {"data": "d"}
    assert manifest.facts == {"template": "glm4", "loss": None}
    assert {group: list(entries) for group, entries in manifest.tensors.items()} == {
        "weights": ["a", "b"],
        "optimizer": ["a::step", "a::exp_avg"],
    }
    assert manifest.tensors["weights"]["b"].dtype == "BF16"
    assert manifest.tensors["weights"]["a"].shape == (5, 3)
    assert manifest.tensors["optimizer"]["a::step"].shape == ()


def test_every_flipped_byte_is_found_and_its_file_named(make: Make) -> None:
    path = make(1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            with pytest.raises(
                Damaged, match=file.name if "manifest" not in file.name else r"manifest\.json"
            ):
                verify(path)
        file.write_bytes(whole)
        verify(path)


def test_every_truncation_is_found(make: Make) -> None:
    path = make(1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1, len(whole) + 1):
            file.write_bytes((whole + b"\n")[:length])
            with pytest.raises(Damaged):
                verify(path)
        file.write_bytes(whole)
    weights = path / "weights-0-of-1.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 3)
    with pytest.raises(
        Damaged, match=rf"weights-0-of-1.safetensors is {size - 3} bytes, should be {size} bytes"
    ):
        verify(path)


def test_a_missing_file_is_named(make: Make) -> None:
    path = make(1)
    for name in ("state.json", "weights-0-of-1.safetensors", "manifest.sha256", "manifest.json"):
        content = (path / name).read_bytes()
        (path / name).unlink()
        with pytest.raises(Damaged, match=name):
            verify(path)
        (path / name).write_bytes(content)
    assert verify(path).step == 1


def test_swapped_files_are_found(make: Make) -> None:
    one, other = make(1), make(2)
    name = "weights-0-of-1.safetensors"
    content = (one / name).read_bytes()
    (one / name).write_bytes((other / name).read_bytes())
    (other / name).write_bytes(content)
    for path in (one, other):
        with pytest.raises(Damaged, match=name):
            verify(path)


def test_a_renamed_checkpoint_is_not_believed(make: Make, tmp_path: Path) -> None:
    moved = make(3).rename(tmp_path / "checkpoints" / "checkpoint-30")
    with pytest.raises(Damaged, match=r"the name says step 30, the manifest says 3"):
        read_manifest(moved)
    assert verify(moved.rename(tmp_path / "a copy")).step == 3


def test_a_newer_schema_is_named(make: Make) -> None:
    path = make(1)
    said = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**said, "schema": 99})
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    with pytest.raises(UserError, match=r"newer version \(schema 99, this is 2\)"):
        verify(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ".."])
def test_a_manifest_names_no_file_outside(make: Make, name: str) -> None:
    path = make(1)
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, files={**manifest.files, name: File(1, "")}))
    with pytest.raises(Damaged, match="outside"):
        read_manifest(path)


def test_pieces_have_to_make_up_the_whole() -> None:
    def span(first: int, count: int) -> Span:
        return Span("f", 0, 0, (first, 0), (count, 3), "")

    require_whole(Stored("F32", (4, 3), (span(0, 1), span(1, 3))), "a")
    require_whole(Stored("F32", (0, 3), ()), "a")
    for pieces in ((span(0, 3),), (span(0, 2), span(0, 2)), (span(0, 3), span(2, 2))):
        with pytest.raises(Damaged, match="the pieces of a hold"):
            require_whole(Stored("F32", (4, 3), pieces), "a")


def test_only_full_names_are_checkpoints() -> None:
    odd = ("checkpoint-", "checkpoint-abc", "checkpoint--5", "checkpoint-1e3", "Checkpoint-7", "checkpoint-٣")
    assert [step_of(name) for name in (*odd, "checkpoint-007", "checkpoint-1\n", "checkpoint-9.bak")] == [
        None
    ] * 9
    assert (step_of("checkpoint-0"), step_of("checkpoint-10000")) == (0, 10000)
