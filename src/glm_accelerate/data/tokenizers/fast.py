"""`tokenizer.json`, read by the `tokenizers` library (GLM-4-0414 and every -hf model)."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Engine

from glm_accelerate.data.tokenizers.fingerprint import fingerprint_of
from glm_accelerate.data.tokenizers.portions import encode_all
from glm_accelerate.data.tokenizers.special import number_of
from glm_accelerate.runtime.errors import UserError


class FastTokenizer:
    """Encodes many texts at once on all cores."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._engine = Engine.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"cannot be read: {error}", where=path, cure="fetch the file again") from error
        added = self._engine.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items()}
        self._plain = (
            _without_added(path) if any(not token.special for token in added.values()) else self._engine
        )
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self._plain, texts)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._engine.decode(list(ids), skip_special_tokens=skip_special)

    def special(self, name: str) -> int:
        return number_of(name, self._special, self._path)

    @property
    def vocab_size(self) -> int:
        return self._engine.get_vocab_size(with_added_tokens=True)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([self._path])


def _without_added(path: Path) -> Engine:
    """A twin that knows no added tokens: the library's switch covers those marked special, not the others."""
    said = json.loads(path.read_bytes())
    said["added_tokens"] = []
    said["post_processor"] = None
    return Engine.from_str(json.dumps(said, ensure_ascii=False))
