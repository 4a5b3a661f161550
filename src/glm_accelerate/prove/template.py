"""Our rendering of a conversation against the model's own chat template, token for token.

A template that differs by one line end trains well and answers badly, and nothing in the loss shows it.
The model's template is run by `transformers`, which is imported here alone, from local files, without
remote code.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm_accelerate.data.encode import encode_prompt, encode_whole
from glm_accelerate.data.templates.detect import chat_template
from glm_accelerate.data.templates.glm4 import only_carries_tools
from glm_accelerate.data.templates.template import Template, function_of
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation, Message
from glm_accelerate.prove.proof import Proof

_SHOWN = 30  # characters on each side of a difference
_CURE = (
    "name the right data.template, correct the model's chat_template, or set prove.template=warn: "
    "the model is then trained on our text, and whatever serves it has to write the same"
)


# One conversation as a template writes it: text, and tokens; None where that needs the tokenizer's own code.
_Rendering = tuple[str, list[int] | None]


def prove_template(
    model_dir: Path,
    template: Template,
    tokenizer: Tokenizer,
    conversation_samples: Sequence[Conversation],
) -> Proof:
    """Compares each conversation, and the prompt before its last answer."""
    own = chat_template(model_dir)
    if own is None or template.name in ("chatglm2", "chatglm3"):
        return Proof(
            "template", True, f"{template.name}; nothing to compare with that runs without remote code"
        )
    theirs = _Theirs(model_dir, own, template)
    compared = 0
    for conversation in conversation_samples:
        if not conversation.messages or _mentions_special(conversation.messages, template):
            continue  # where a text says `<|user|>` the two differ by design
        for messages, prompt in _cases(conversation.messages):
            text, tokens = theirs.render(messages, prompt)
            our_text, our_tokens = _ours(messages, template, tokenizer, prompt)
            fault = ""
            if text != our_text:
                fault = f"differs from the model's own chat template {_difference(text, our_text)}"
            elif tokens is not None and tokens != our_tokens:
                fault = "is tokenized unlike the model's own tokenizer does"
            if fault:
                return Proof("template", False, f"{template.name}: {conversation.place} {fault}", _CURE)
            compared += 1
    how = "token for token" if theirs.tokenizes else "in text"
    return Proof("template", True, f"{template.name}: {compared} renderings equal the model's own {how}")


class _Theirs:
    """The model's own template and, where it runs without remote code, its own tokenizer."""

    def __init__(self, model_dir: Path, jinja: str, template: Template) -> None:
        self._jinja, self._template = jinja, template
        self._tokenizer: Any = None
        if (model_dir / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)

    @property
    def tokenizes(self) -> bool:
        return self._tokenizer is not None

    def render(self, messages: Sequence[Message], prompt: bool) -> _Rendering:
        from transformers.utils.chat_template_utils import render_jinja_template

        apart = self._template.name == "glm4-0414"  # tools are handed over beside the messages
        kept = [message for message in messages if not (apart and only_carries_tools(message))]
        turns = [_as_theirs(message, with_tools=not apart) for message in kept]
        tools: list[Any] = [tool for message in messages for tool in message.tools] if apart else []
        [text], _ = render_jinja_template(
            [turns], tools=tools or None, chat_template=self._jinja, add_generation_prompt=prompt
        )
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if self.tokenizes else None
        return text, tokens


def _as_theirs(message: Message, *, with_tools: bool) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.call:
        turn |= {"metadata": message.call.name, "content": message.call.arguments}
    if message.tools and with_tools:
        turn["tools"] = [{"type": "function", "function": function_of(tool)} for tool in message.tools]
    return turn


def _ours(messages: Sequence[Message], template: Template, tokenizer: Tokenizer, prompt: bool) -> _Rendering:
    pieces = template.render(messages, generation_prompt=prompt)
    if not prompt and messages[-1].role == "assistant":
        pieces = pieces[:-1]  # the model's own template writes no stop token at the end
    text = "".join(piece.text for piece in pieces)
    whole = encode_prompt(messages, template, tokenizer) if prompt else encode_whole(pieces, tokenizer)
    return text, whole


def _cases(messages: Sequence[Message]) -> list[tuple[Sequence[Message], bool]]:
    answers = [turn for turn, message in enumerate(messages) if message.role == "assistant" and turn]
    return [(messages, False), *((messages[:turn], True) for turn in answers[-1:])]


def _mentions_special(messages: Sequence[Message], template: Template) -> bool:
    """Whether any text that is written has a mark: messages, calls, descriptions of tools."""
    marks = ("<|", "|>", "[gMASK]", "<sop>", "[MASK]", "[sMASK]", "<eop>")
    texts = [piece.text for piece in template.render(messages) if not piece.special]
    return any(mark in text for text in texts for mark in marks)


def _difference(wanted: str, ours: str) -> str:
    differing = (at for at, pair in enumerate(zip(wanted, ours, strict=False)) if pair[0] != pair[1])
    at = next(differing, min(len(wanted), len(ours)))
    start = max(0, at - _SHOWN)
    return f"at character {at}: {wanted[start : at + _SHOWN]!r}, ours {ours[start : at + _SHOWN]!r}"
