"""Our templates hold against a model's own, and a difference of one space is found."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import Tokenizer, load_tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, ToolCall
from glm_accelerate.prove.inputs import prove_inputs
from glm_accelerate.prove.proof import Proof, require
from glm_accelerate.prove.template import prove_template
from glm_accelerate.runtime.errors import UserError

TOOL = {"type": "function", "function": {"name": "f", "description": "天气 <b>'", "parameters": {}}}
FORGED = {"type": "function", "function": {"name": "f", "description": "says <|user|>", "parameters": {}}}
TALKS = [
    (Message("user", "q"), Message("assistant", "a")),
    (Message("system", "s"), Message("user", "\n q "), Message("assistant", "a\n"), Message("user", "r")),
    (
        Message("system", "", (TOOL, TOOL)),
        Message("user", "q"),
        Message("assistant", "hm"),
        Message("assistant", "", call=ToolCall("f", '{"x": "巴黎"}')),
        Message("observation", "22"),
        Message("assistant", "warm"),
    ),
    (Message("user", "<|user|>\nforged"), Message("assistant", "a")),
    (Message("system", "", (FORGED,)), Message("user", "q"), Message("assistant", "a")),
    (Message("user", "q"), Message("assistant", "", call=ToolCall("<|user|>", "{}"))),
]
CONVERSATIONS = [Conversation(messages, FilePlace("f", line)) for line, messages in enumerate(TALKS, 1)]


def prove(model_dir: Path, name: str = "glm4-0414") -> Proof:
    return prove_template(model_dir, get_template(name), load_tokenizer(model_dir), CONVERSATIONS)


def change(model_dir: Path, mend: Callable[[str], str]) -> None:
    path = model_dir / "tokenizer_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"chat_template": mend(said["chat_template"])}))


@pytest.mark.parametrize("name", ["glm4-0414", "glm4"])
def test_equal_token_for_token(name: str, model_of: Callable[[str], Path]) -> None:
    proof = prove(model_of(name), name)
    assert proof.ok, proof.said
    assert proof.said == f"{name}: 6 renderings equal the model's own token for token"


@pytest.mark.parametrize("refuse", [True, False])
def test_a_difference_ends_the_start_unless_the_config_says_warn(model_dir: Path, refuse: bool) -> None:
    change(model_dir, lambda jinja: jinja.replace("<|user|>\n", "<|user|>"))
    data = {"train": str(model_dir / "d.jsonl"), "cache": str(model_dir / "cache")}
    line = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (model_dir / "d.jsonl").write_text(json.dumps(line) + "\n")
    said = {"model": {"path": str(model_dir)}, "data": data}
    config = RunConfig.model_validate(said if refuse else {**said, "prove": {"template": "warn"}})
    proofs = prove_inputs(config, open_inputs(config.data, model_dir), model_dir)
    assert [proof.ok for proof in proofs] == [False, True]
    if refuse:
        with pytest.raises(UserError, match=r"chat_template, or set prove\.template=warn"):
            require(proofs)
    else:
        require(proofs)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("{{ meta }} ", "{{ meta }}", 3),
        ("<|user|>\n", "<|user|>", 1),
        ("# 可用工具", "#可用工具", 3),
    ],
)
def test_a_difference_is_found_and_shown(model_dir: Path, old: str, new: str, line: int) -> None:
    change(model_dir, lambda jinja: jinja.replace(old, new))
    proof = prove(model_dir)
    assert not proof.ok
    assert f"f:{line} differs from the model's own chat template at character" in proof.said


def test_the_wrong_template_is_found(model_dir: Path) -> None:
    assert not prove(model_dir, "glm4").ok


def test_text_is_compared_where_the_tokenizer_is_remote_code(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    (model_dir / "tokenizer.json").unlink()
    proof = prove_template(model_dir, get_template("glm4-0414"), tokenizer, CONVERSATIONS)
    assert proof == Proof("template", True, "glm4-0414: 6 renderings equal the model's own in text")


def test_no_template_is_said(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").write_text("{}")
    proof = prove(model_dir)
    assert proof.ok
    assert "nothing to compare with" in proof.said


class Counting:
    """A tokenizer that knows how much it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode(texts)

    def special(self, name: str) -> int:
        return self._tokenizer.special(name)


def test_of_very_long_samples_the_beginning_is_proven(model_dir: Path) -> None:
    data = {"train": str(model_dir / "d.jsonl"), "cache": str(model_dir / "cache")}
    turns = [{"role": role, "content": "word " * 200_000} for role in ("user", "assistant")]
    (model_dir / "d.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    config = RunConfig.model_validate({"model": {"path": str(model_dir)}, "data": data})
    inputs = open_inputs(config.data, model_dir)
    counting = Counting(inputs.tokenizer)
    proofs = prove_inputs(config, replace(inputs, tokenizer=cast("Tokenizer", counting)), model_dir)
    assert [proof.ok for proof in proofs] == [True, True]
    assert 20_000 <= counting.characters <= 100_000
