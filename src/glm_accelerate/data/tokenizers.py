"""Text to token numbers and back, from `tokenizer.json`, tiktoken ranks or a SentencePiece model.

Special tokens are asked for by name and never recognised in text, so whoever types `<|user|>` gets some
ordinary tokens and cannot forge a turn.
"""

import base64
import binascii
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE

from glm_accelerate.data.templates.detect import detect_template
from glm_accelerate.runtime.errors import UserError

PORTION = 1 << 20  # characters that are encoded at once: the library needs a hundred bytes for each
_SEARCH = 1 << 16  # where so many letters follow each other, a long text is cut between letters
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
_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")  # numbered after SentencePiece's pieces
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_AGAIN = "fetch the file again"


class Tokenizer(ABC):
    """`special` are the special tokens by name; `files` decide all numbers."""

    def __init__(self, files: Sequence[Path], special: Mapping[str, int]) -> None:
        self._files, self._special = files, special
        self._names = {number: name for name, number in special.items()}

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text by itself, as ordinary text whatever it contains."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ordinary tokens."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Special tokens appear by name or are left out; the text between two is decoded by itself."""
        text, ordinary = "", list[int]()
        for number in ids:
            if number not in self._names:
                ordinary.append(number)
                continue
            text += self._decode(ordinary) + ("" if skip_special else self._names[number])
            ordinary = []
        return text + self._decode(ordinary)

    def special(self, name: str) -> int:
        """The number of a special token; UserError if the model has none of that name."""
        if name not in self._special:
            raise UserError(
                f"the tokenizer has no special token {name}",
                where=self._files[0],
                cure=f"it has {', '.join(self._special) or 'none'}: does data.template fit the model?",
            )
        return self._special[name]

    @property
    def vocab_size(self) -> int:
        """One more than the highest number; a model's table of embeddings may be larger."""
        return max(self._special.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names and contents of the files that are there."""
        digest = hashlib.sha256()
        for path in self._files:
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


class FastTokenizer(Tokenizer):
    """`tokenizer.json` (GLM-4-0414 and every -hf model), on all cores."""

    def __init__(self, path: Path) -> None:
        try:
            self._engine = Engine.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"cannot be read: {error}", where=path, cure=_AGAIN) from error
        added = self._engine.get_added_tokens_decoder()
        super().__init__([path], {token.content: number for number, token in added.items()})
        self._plain = self._engine
        if any(not token.special for token in added.values()):
            # The library's switch covers tokens marked special, not the others: a second engine knows none.
            content = json.loads(path.read_bytes()) | {"added_tokens": [], "post_processor": None}
            self._plain = Engine.from_str(json.dumps(content, ensure_ascii=False))
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self._plain, texts)

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """By the library, for which added tokens that are not special are text."""
        return self._engine.decode(list(ids), skip_special_tokens=skip_special)

    @property
    def vocab_size(self) -> int:
        return self._engine.get_vocab_size(with_added_tokens=True)


class RankTokenizer(Tokenizer):
    """`tokenizer.model` of GLM-4-9B: tiktoken ranks as a byte-level BPE, which gives the same numbers.

    A rank file lists the byte strings that are tokens; those of lower rank are merged sooner. A merge table
    lists pairs: every way to cut a token into two other tokens is one, in the order of the merged ranks.
    """

    def __init__(self, path: Path) -> None:
        config, ranks = path.parent / "tokenizer_config.json", read_ranks(path)
        super().__init__([path, config], _special_tokens(config, len(ranks)))
        self._engine = _engine(ranks)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self._engine, texts)

    def _decode(self, ids: list[int]) -> str:
        return self._engine.decode(ids)


class SentenceTokenizer(Tokenizer):
    """`tokenizer.model` of ChatGLM2 and, with a token for each of its `roles`, ChatGLM3: SentencePiece.

    Every text is given SentencePiece's leading space, as the original does; control pieces such as `</s>` are
    never recognised in text.
    """

    def __init__(self, path: Path, *, roles: bool) -> None:
        from sentencepiece import SentencePieceProcessor  # here: most models do without it

        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            what = "is neither tiktoken ranks nor a SentencePiece model"
            raise UserError(what, where=path, cure=_AGAIN) from error
        first = self._model.get_piece_size()
        names = (*_CHATGLM, *_ROLES) if roles else _CHATGLM
        own = {"<unk>": self._model.unk_id(), "<s>": self._model.bos_id(), "</s>": self._model.eos_id()}
        super().__init__([path], own | {name: first + index for index, name in enumerate(names)})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def _decode(self, ids: list[int]) -> str:
        """Numbers beyond all pieces, for which a padded vocabulary has room, are left out."""
        return self._model.decode([number for number in ids if number < self.vocab_size])


def load_tokenizer(model_dir: Path, template: str | None = None) -> Tokenizer:
    """From `tokenizer.json`, or else from `tokenizer.model`, which holds tiktoken ranks or SentencePiece.

    Without the name of the template the files have to tell ChatGLM2 from ChatGLM3.
    """
    fast, model = model_dir / "tokenizer.json", model_dir / "tokenizer.model"
    if fast.is_file():
        return FastTokenizer(fast)
    if not model.is_file():
        raise UserError(
            "has neither tokenizer.json nor tokenizer.model",
            where=model_dir,
            cure="copy the tokenizer files of the published model into the directory",
        )
    with model.open("rb") as file:
        first_line = file.readline(1024)
    if _token_and_rank(first_line):
        return RankTokenizer(model)
    return SentenceTokenizer(model, roles=(template or detect_template(model_dir)) == "chatglm3")


def encode_all(engine: Engine, texts: Sequence[str], portion: int = PORTION) -> list[list[int]]:
    """Each text by itself: short ones side by side on all cores, a long one in portions."""
    if any(len(text) > portion for text in texts):
        parts = [
            [encode_all(engine, [part], len(part)) for part in portions(text, portion)] for text in texts
        ]
        return [[number for [ids] in encoded for number in ids] for encoded in parts]
    return [encoding.ids for encoding in engine.encode_batch_fast(list(texts), add_special_tokens=False)]


def portions(text: str, size: int) -> Iterator[str]:
    """Cuts between a letter and a character that is none: no word of GLM-4's patterns extends across, and
    nothing looks back, so the tokens are those of the whole text.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        lowest = max(start, end - _SEARCH)
        cuts = (at for at in range(end, lowest, -1) if text[at - 1].isalpha() and not text[at].isalpha())
        stop = next(cuts, end)
        yield text[start:stop]
        start = stop
    yield text[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a rank file."""
    ranks: dict[bytes, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            pair = _token_and_rank(line)
            if pair:
                ranks[pair[0]] = pair[1]
            elif line.split():
                raise UserError("is not `base64 rank`", where=f"{path}:{number}", cure=_AGAIN)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError("has gaps in its ranks", where=path, cure=_AGAIN)
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError("lacks some of the 256 bytes", where=path, cure=_AGAIN)
    return ranks


def _token_and_rank(line: bytes) -> tuple[bytes, int] | None:
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        return None
    try:
        return base64.b64decode(fields[0], validate=True), int(fields[1])
    except binascii.Error:
        return None


def _special_tokens(config: Path, first: int) -> dict[str, int]:
    try:
        listed = json.loads(config.read_bytes()).get("added_tokens_decoder") if config.is_file() else None
        if listed:
            return {token["content"]: int(number) for number, token in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot be read: {error}", where=config, cure=_AGAIN) from error
    return {name: first + index for index, name in enumerate(SPECIAL)}


def _engine(ranks: dict[bytes, int]) -> Engine:
    visible = _visible_bytes()
    names = {token: token.decode("latin-1").translate(visible) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(ranks[one], ranks[two], one, two) for one, two in cuts if one in ranks and two in ranks]
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
    """The byte-level alphabet: printable Latin-1 is itself, the other bytes are U+0100 and following."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: byte for byte in shown} | {byte: 0x100 + index for index, byte in enumerate(hidden)}
