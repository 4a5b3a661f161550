"""What may differ on a resume: never, when accepted by name, or at the cost of the last bit."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.runtime import digests
from glm_accelerate.runtime.digests import file_digest
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.fingerprints import model_content
from glm_accelerate.train.mismatch import ACCEPTABLE, SUBJECTS, Mismatched, check, compare

NOW = {name: f"{name} as it is, 0123" for name in SUBJECTS}


def test_the_same_is_silent() -> None:
    assert compare(NOW, NOW) == []
    assert check(NOW, NOW, "here") == []


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_difference_has_its_verdict(name: str) -> None:
    then = {**NOW, name: "something else"}
    (found,) = compare(then, NOW)
    assert (found.name, found.then, found.now) == (name, "something else", NOW[name])
    if SUBJECTS[name][0] == "warn":
        (warning,) = check(then, NOW, "here")
        assert f"{name} was something else, is {NOW[name]}" in warning
        assert "not bit-identical" in warning
        return
    with pytest.raises(Mismatched, match=f"the {name} is not what this checkpoint was made with") as caught:
        check(then, NOW, "here", ACCEPTABLE - {name})
    assert (found.flag is not None) == (name in ACCEPTABLE)
    if found.flag:
        assert f"--accept {name}" in str(caught.value)
        assert len(check(then, NOW, "here", {name})) == 1
    else:
        assert "--init-from" in str(caught.value)
        with pytest.raises(Mismatched):
            check(then, NOW, "here", set(SUBJECTS) - {name})


def test_all_differences_come_at_once() -> None:
    then = {**NOW, "schedule": "x", "order": "y", "threads": "z"}
    with pytest.raises(Mismatched, match="--accept order --accept schedule") as caught:
        check(then, NOW, "here")
    assert [mismatch.name for mismatch in caught.value.mismatches] == ["order", "schedule"]


def test_what_schema_1_recorded_is_compared_as_far_as_it_goes() -> None:
    then = {"model": "m", "data": "0123", "tokenizer": "0123", "template": NOW["template"], "optimizer": "o"}
    (warning,) = check({**then, "environment": "e"}, NOW, "here")
    assert "recorded less" in warning
    with pytest.raises(UserError, match="the data is not"):
        check({**then, "environment": "e", "data": "9999"}, NOW, "here")


def test_digests_are_remembered_until_the_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = file_digest(file)
    assert not list((tmp_path / "cache").rglob("*"))  # too fresh to be trusted
    os.utime(file, ns=(0, 10**18))
    assert file_digest(file) == first
    (entry,) = (tmp_path / "cache" / "digests").iterdir()
    entry.write_text("a" * 64)
    assert file_digest(file) == "a" * 64  # it is the memory that answers
    entry.write_bytes(b"\xff rubbish")
    assert file_digest(file) == first
    file.write_bytes(b"two")
    assert file_digest(file) != first
    monkeypatch.setattr(digests, "FRESH_NS", -(10**30))
    (tmp_path / "file").touch()
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "file"))  # where nothing can be written
    assert file_digest(tmp_path / "file")


def test_one_flipped_bit_makes_another_model(make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4")
    before = model_content(directory)
    assert before.startswith("glm4, 3 layers of 60, 6 heads on 2, vocabulary 131, ")
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_content(directory) != before
