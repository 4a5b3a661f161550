"""Text to token numbers and back.

Special tokens are asked for by name and never recognised in text, so whoever types `<|user|>` gets some
ordinary tokens and cannot forge a turn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from glm_accelerate.runtime.errors import UserError


class Tokenizer(Protocol):
    """What the data line asks of a tokenizer."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text by itself, as ordinary text whatever it says."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def special(self, name: str) -> int:
        """The number of a special token; UserError if the model has none of that name."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest number; a model's table of embeddings may be larger."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the files that decide the numbers."""
        ...


def load_tokenizer(model_dir: Path, template: str | None = None) -> Tokenizer:
    """From `tokenizer.json`, or else from `tokenizer.model`, which holds tiktoken ranks or SentencePiece.

    `template` is its settled name; without it the files have to tell ChatGLM2 from ChatGLM3.
    """
    words, model = model_dir / "tokenizer.json", model_dir / "tokenizer.model"
    if words.is_file():
        from glm_accelerate.data.tokenizers.fast import FastTokenizer

        return FastTokenizer(words)
    if not model.is_file():
        raise UserError(
            "has neither tokenizer.json nor tokenizer.model",
            where=model_dir,
            cure="copy the tokenizer files of the published model into the directory",
        )
    from glm_accelerate.data.tokenizers.ranks import RankTokenizer, holds_ranks

    if holds_ranks(model):
        return RankTokenizer(model)
    from glm_accelerate.data.templates.detect import detect_template
    from glm_accelerate.data.tokenizers.sentence import SentenceTokenizer

    return SentenceTokenizer(model, roles=(template or detect_template(model_dir)) == "chatglm3")
