"""What may differ on a resume: never, when accepted by name, or at the cost of the last bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.made_with import model_content
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.mismatch import ACCEPTABLE, SUBJECTS, Mismatched, check, compare

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
        assert f"{name} was something else, now {NOW[name]}" in warning
        assert "no longer bit-identical" in warning
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


def test_one_flipped_bit_makes_another_model(make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4")
    before = model_content(directory)
    assert before.startswith("glm4, 3 layers of 60, 6 heads on 2, vocabulary 131, ")
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_content(directory) != before
