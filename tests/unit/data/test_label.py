"""`labels: stock` against the stock scripts' rule, worked out here token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from glm_accelerate.data.encode import Kept, Left, encode
from glm_accelerate.data.label import TrainOn
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import Tokenizer, load_tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}},
}
TALK = (
    Message("system", "be kind", (TOOL,)),
    Message("user", "what is the weather?"),
    Message("assistant", 'f\n{"x": "Paris"}'),
    Message("observation", "22 degrees"),
    Message("assistant", "It is warm."),
    Message("user", "thanks"),
    Message("assistant", "with pleasure"),
)
Labelled = tuple[list[int], list[int]]


class Stock:
    """What GLM-4's script computes, with the library's tokenizer and the model's Jinja."""

    def __init__(self, directory: Path, jinja: str, tokenizer: Tokenizer) -> None:
        self.library = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        self.library.chat_template = jinja
        self.special = tokenizer.special

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        said: list[Any] = []
        for message in messages:
            tools = {"tools": list(message.tools)} if message.tools else {}
            said.append({"role": message.role, "content": message.content} | tools)
        text = self.library.apply_chat_template(said, tokenize=False)
        assert isinstance(text, str)
        return self.library.encode(text, add_special_tokens=False)

    def one_by_one(self, messages: Sequence[Message], limit: int) -> Labelled:
        tokens, mask = [self.special("[gMASK]"), self.special("<sop>")], [False, False]
        for message in messages:
            new = self.tokens([message])[2:]
            tokens += new
            mask += [message.role == "assistant"] * len(new)
        return self.moved(tokens, mask, limit)

    def combined(self, messages: Sequence[Message], limit: int) -> Labelled:
        tokens = self.tokens(messages)
        last = max(at for at, token in enumerate(tokens) if token == self.special("<|assistant|>"))
        return self.moved(tokens, [at > last for at in range(len(tokens))], limit)

    def moved(self, tokens: list[int], mask: list[bool], limit: int) -> Labelled:
        tokens = [*tokens, self.special("<|user|>")]
        labels = [token if on else -100 for token, on in zip(tokens, [False, *mask], strict=True)]
        return tokens[:limit], labels[:limit]


def labelled(sample: object) -> Labelled:
    assert isinstance(sample, Kept)
    pairs = list(zip(sample.tokens.tolist(), sample.targets.tolist(), strict=True))
    return [token for token, _ in pairs], [token if target else -100 for token, target in pairs]


@pytest.mark.parametrize("limit", [4096, 150])
@pytest.mark.parametrize("turns", [7, 6, 5, 3])
@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("name", ["glm4", "glm4-0414"])
def test_stock_labels_of_glm4(
    name: str, train_on: TrainOn, turns: int, limit: int, fast_dir: Path, chat_templates: dict[str, str]
) -> None:
    tokenizer = load_tokenizer(fast_dir)
    stock = Stock(fast_dir, chat_templates[name], tokenizer)
    conversation = Conversation(TALK[:turns], FilePlace("f", 1))
    template = get_template(name)
    found = encode([conversation], template, tokenizer, train_on=train_on, labels="stock", max_tokens=limit)
    tokens, labels = (stock.one_by_one if train_on == "all" else stock.combined)(TALK[:turns], limit)
    if any(label != -100 for label in labels):
        assert labelled(found[0]) == (tokens, labels)
    else:
        assert found == [Left(conversation.place, "no target")]


def test_stock_labels_of_chatglm3_learn_what_tools_say(sentence_dir: Path) -> None:
    tokenizer = load_tokenizer(sentence_dir)
    messages = [Message(m.role, m.content) for m in TALK]
    tokens, mask = [tokenizer.special("[gMASK]"), tokenizer.special("sop")], [False, False]
    for message in messages:
        newline, content = tokenizer.encode(["\n", message.content])
        new = [tokenizer.special(f"<|{message.role}|>"), *newline, *content]
        tokens += new
        mask += [message.role not in ("system", "user")] * len(new)
    tokens.append(tokenizer.special("</s>"))
    labels = [token if on else -100 for token, on in zip(tokens, [False, *mask], strict=True)]
    conversation = Conversation(tuple(messages), FilePlace("f", 1))
    [found] = encode([conversation], get_template("chatglm3"), tokenizer, labels="stock", max_tokens=4096)
    assert labelled(found) == (tokens, labels)


def test_exact_differs_from_stock_only_in_the_last_stop(fast_dir: Path) -> None:
    tokenizer, template = load_tokenizer(fast_dir), get_template("glm4")
    conversation = Conversation(TALK, FilePlace("f", 1))
    exact, stock = (
        labelled(encode([conversation], template, tokenizer, labels=labels, max_tokens=4096)[0])
        for labels in ("exact", "stock")
    )
    assert exact == stock
