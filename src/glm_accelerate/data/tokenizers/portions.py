"""Encoding very long texts in portions: the library needs a hundred bytes of memory for each character.

A text may be cut between a letter and what is no letter: in GLM-4's patterns no word reaches across, and
nothing looks back, so the tokens are those of the whole.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer as Engine

PORTION = 1 << 20  # characters
_SEARCH = 1 << 16  # where so many letters stand in a row, the cut is made all the same


def encode_all(engine: Engine, texts: Sequence[str], portion: int = PORTION) -> list[list[int]]:
    """Each text by itself, short ones side by side on all cores."""
    if all(len(text) <= portion for text in texts):
        return [found.ids for found in engine.encode_batch_fast(list(texts), add_special_tokens=False)]
    return [_encode_long(engine, text, portion) for text in texts]


def _encode_long(engine: Engine, text: str, portion: int) -> list[int]:
    ids: list[int] = []
    for part in portions(text, portion):
        [found] = engine.encode_batch_fast([part], add_special_tokens=False)
        ids += found.ids
    return ids


def portions(text: str, size: int) -> Iterator[str]:
    start = 0
    while len(text) - start > size:
        end = start + size
        lowest = max(start, end - _SEARCH)
        cuts = (at for at in range(end, lowest, -1) if text[at - 1].isalpha() and not text[at].isalpha())
        stop = next(cuts, end)
        yield text[start:stop]
        start = stop
    yield text[start:]
