"""A conversation with a model: its turns so far, and each answer as text while it comes."""

from collections.abc import Generator, Iterable, Iterator

from glm_accelerate.data.encode import encode_prompt
from glm_accelerate.data.templates import Template
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Message
from glm_accelerate.generate.answer import stream
from glm_accelerate.generate.sample import Sampling
from glm_accelerate.models.decoder import Decoder

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no whole character


class Chat:
    """The turns of a conversation. `system` opens every one."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        template: Template,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        system: str | None = None,
    ) -> None:
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._sampling, self._max_new_tokens = sampling, max_new_tokens
        self._opening = [Message("system", system)] if system else []
        self.messages = list(self._opening)

    def clear(self) -> None:
        """Begin a new conversation."""
        self.messages = list(self._opening)

    def ask(self, question: str) -> Generator[str]:
        """The answer, piece by piece. Both turns are remembered, also of an answer that is broken off;
        a question that cannot be asked is not.
        """
        asked = [*self.messages, Message("user", question)]
        prompt = encode_prompt(asked, self._template, self._tokenizer)
        tokens = stream(
            self._model,
            prompt,
            stops={self._tokenizer.special(name) for name in self._template.stops},
            max_new_tokens=self._max_new_tokens,
            sampling=self._sampling,
        )
        answer = ""
        try:
            for text in readable(tokens, self._tokenizer):
                new = text if answer else text.lstrip()  # the line end after <|assistant|> is the model's own
                answer += new
                if new:
                    yield new
        finally:
            if answer:
                self.messages = [*asked, Message("assistant", answer.strip())]


def readable(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as its tokens come. What ends within a character waits for the rest of it.

    A token's text may depend on those before it (a leading space), so each is decoded behind the last few.
    """
    window: list[int] = []  # what was shown last, and what waits
    shown = 0  # of the window's text
    settled = 0  # of its tokens
    for token in tokens:
        window.append(token)
        text = tokenizer.decode(window)
        if text.endswith(REPLACEMENT):
            continue
        yield text[shown:]
        window = window[settled:]
        settled, shown = len(window), len(tokenizer.decode(window))
    yield tokenizer.decode(window)[shown:]
