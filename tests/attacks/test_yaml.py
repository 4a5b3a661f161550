"""Config files that want more than to configure: each leaves no trace and is named in one line."""

from pathlib import Path

import pytest

from glm_accelerate.config.load import load_config
from glm_accelerate.config.strict_yaml import read_document
from glm_accelerate.runtime.errors import UserError


def complaint(text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_document(text, "evil.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch",
        "!!python/object/new:os.system",
        "!!python/name:os.system",
        "!<tag:yaml.org,2002:python/object/apply:os.system>",
        "!!binary",
        "!!int",
        "!own",
        "!",
    ],
)
def test_no_tag_is_obeyed(tag: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    assert "evil.yaml:1: tags (" in complaint(f"model: {tag} ['{canary}']")
    assert "evil.yaml:1: tags (" in complaint(f"model: {tag} '{canary}'")
    assert not canary.exists()


def test_a_billion_laughs_are_not_laughed() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert (
        complaint("\n".join(lines)) == "evil.yaml:2: aliases (`*name`) are not allowed (write the value out)"
    )


def test_a_value_that_holds_itself_is_refused() -> None:
    assert "aliases" in complaint("a: &a [*a]")


def test_merge_keys_are_ordinary_unknown_keys() -> None:
    assert read_document("a: {<<: {b: 1}}", "f").values == {"a": {"<<": {"b": 1}}}


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 100_000, "a: " + "{b: " * 50_000, "- " * 50_000, "? " * 50_000]
)
def test_depth_is_bounded(text: str) -> None:
    assert complaint(text) == "evil.yaml:1: nested deeper than 20 levels"


def test_size_is_bounded_before_parsing(tmp_path: Path) -> None:
    assert "larger than" in complaint("a: " + "x" * (1 << 20))
    path = tmp_path / "sparse.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of zeros, none of it on disk
    with pytest.raises(UserError, match="larger than"):
        load_config(path)


@pytest.mark.parametrize(
    "number", ["9" * 5000, "1e" + "9" * 5000, "0x" + "f" * 5000, ".inf", "-.inf", ".nan", "1e999"]
)
def test_numbers_are_finite_and_short(number: str) -> None:
    assert complaint(f"a: {number}").startswith("evil.yaml:1: ")


@pytest.mark.parametrize("character", ["\0", "\x07", "\x1b", "\x7f", "\ufffe"])
def test_control_characters_are_named(character: str) -> None:
    assert complaint(f"a: 1\nb: {character}") == (
        f"evil.yaml:2: character U+{ord(character):04X} is not allowed in YAML"
    )


def test_a_file_name_that_is_no_text_is_called_so() -> None:
    said = "a name that is not UTF-8 cannot stand in a config (rename the file or link to it)"
    assert complaint("a: run\udcff") == f"evil.yaml: {said}"


@pytest.mark.parametrize(
    "text", ["a: 1\n---\nb: 2", "a: 1\n...\nb", "%TAG ! x\na: 1", "a: b: c", "a: [", "\ta: 1", "@"]
)
def test_what_is_not_one_document_is_refused(text: str) -> None:
    assert "evil.yaml:" in complaint(text)


@pytest.mark.parametrize("text", ["1: x", "? [a]\n: b", "null: x", "{a: 1}: b", "true: x"])
def test_keys_are_words(text: str) -> None:
    assert complaint(text) == "evil.yaml:1: a key has to be a word"


def test_nothing_is_interpolated() -> None:
    assert read_document("a: ${HOME}\nb: $(id)", "f").values == {"a": "${HOME}", "b": "$(id)"}
