"""`tokenizer.model` of GLM-4-9B: tiktoken ranks, turned into a byte-level BPE of the `tokenizers` library.

A rank file says which byte strings are tokens, the earlier the sooner they are merged. A merge table says
which pairs: every way of cutting a token into two other tokens is one, in the order of the merged ranks.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE

from glm_accelerate.data.tokenizers.fingerprint import fingerprint_of
from glm_accelerate.data.tokenizers.portions import encode_all
from glm_accelerate.data.tokenizers.special import decode_around, number_of
from glm_accelerate.runtime.errors import UserError

# Where text is cut before bytes are merged: words with one character before them, up to three digits,
# punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Their numbers follow the last rank, in this order, where tokenizer_config.json does not list them.
SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>",
)  # fmt: skip


class RankTokenizer:
    """The same numbers as tiktoken gives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        ranks = read_ranks(path)
        self._special = _special_tokens(path.parent / "tokenizer_config.json", len(ranks))
        self._names = {number: name for name, number in self._special.items()}
        self._engine = _engine(ranks)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self._engine, texts)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return decode_around(ids, self._names, self._engine.decode, skip=skip_special)

    def special(self, name: str) -> int:
        return number_of(name, self._special, self._path)

    @property
    def vocab_size(self) -> int:
        return max(self._special.values()) + 1

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([self._path, self._path.parent / "tokenizer_config.json"])


def holds_ranks(path: Path) -> bool:
    """Whether the file begins like ranks: base64, a space, a number."""
    with path.open("rb") as file:
        first = file.readline(1024).split()
    return len(first) == 2 and first[1].isdigit() and _bytes_of(first[0]) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.split()
            token = _bytes_of(fields[0]) if len(fields) == 2 and fields[1].isdigit() else None
            if token is None:
                if not fields:
                    continue
                raise UserError("is not `base64 rank`", where=f"{path}:{number}", cure="fetch the file again")
            ranks[token] = int(fields[1])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError("has gaps in its ranks", where=path, cure="fetch the file again")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError("lacks some of the 256 bytes", where=path, cure="fetch the file again")
    return ranks


def _bytes_of(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def _special_tokens(config: Path, first: int) -> dict[str, int]:
    try:
        listed = json.loads(config.read_bytes()).get("added_tokens_decoder") if config.is_file() else None
        if listed:
            return {token["content"]: int(number) for number, token in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot be read: {error}", where=config, cure="fetch the file again") from error
    return {name: first + place for place, name in enumerate(SPECIAL)}


def _engine(ranks: dict[bytes, int]) -> Engine:
    written = _visible_bytes()
    names = {token: token.decode("latin-1").translate(written) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [
            (ranks[left], ranks[right], left, right)
            for left, right in cuts
            if left in ranks and right in ranks
        ]
        merges += [(names[left], names[right]) for _, _, left, right in sorted(pairs)]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    # tiktoken looks a whole word up before it merges: ignore_merges does the same.
    engine = Engine(BPE(vocab, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([cut, bytewise])
    engine.decoder = decoders.ByteLevel()
    return engine


def _visible_bytes() -> dict[int, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: byte for byte in shown} | {byte: 0x100 + place for place, byte in enumerate(hidden)}
