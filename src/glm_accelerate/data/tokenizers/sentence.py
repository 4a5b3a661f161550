"""`tokenizer.model` of ChatGLM2 and ChatGLM3: SentencePiece, the special tokens numbered after its pieces.

Every text is given SentencePiece's leading space, as the original does; control pieces such as `</s>` are
never recognised in text.
"""

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from glm_accelerate.data.tokenizers.fingerprint import fingerprint_of
from glm_accelerate.data.tokenizers.special import decode_around, number_of
from glm_accelerate.runtime.errors import UserError

_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class SentenceTokenizer:
    """`roles`: ChatGLM3, which has a token for each role."""

    def __init__(self, path: Path, *, roles: bool) -> None:
        self._path = path
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(
                "is neither tiktoken ranks nor a SentencePiece model", where=path, cure="fetch the file again"
            ) from error
        first = self._model.get_piece_size()
        names = (*_SPECIAL, *_ROLES) if roles else _SPECIAL
        added = {name: first + place for place, name in enumerate(names)}
        own = {"<unk>": self._model.unk_id(), "<s>": self._model.bos_id(), "</s>": self._model.eos_id()}
        self._special = {**own, **added}
        self._names = {number: name for name, number in self._special.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Numbers beyond all pieces, for which a padded vocabulary has room, stand for nothing."""
        known = [number for number in ids if number < self.vocab_size]
        return decode_around(known, self._names, self._model.decode, skip=skip_special)

    def special(self, name: str) -> int:
        return number_of(name, self._special, self._path)

    @property
    def vocab_size(self) -> int:
        return max(self._special.values()) + 1

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([self._path])
