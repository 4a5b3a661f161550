"""A part of the training data held out by what its samples say, never by where they stand.

content -> 64 bits; the smallest are held out. Copies fall on one side, whatever their order, file or form.
"""

import hashlib
import json
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.store import SourcePart, Store
from glm_accelerate.data.types import Conversation
from glm_accelerate.runtime.errors import UserError


def content_number(conversation: Conversation) -> int:
    """64 bits of what is said in it: not the form it was written in, nor which answers are masked."""
    said = [
        [m.role, m.content, m.tools, m.call and [m.call.name, m.call.arguments]]
        for m in conversation.messages
    ]
    text = json.dumps([conversation.text, said], ensure_ascii=False, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def hold_out(store: Store, wanted: int | float) -> tuple[Store, Store, int]:
    """(to train on, held out, copies that are in neither): a share of all contents, or so many of them.

    A share keeps every sample on its side for ever. A number holds out the smallest contents: of data that
    grows, samples may leave for the training side, and none that was trained on is ever held out.
    """
    contents = np.concatenate([part.contents for part in store.parts])
    if isinstance(wanted, float):
        held = contents < np.uint64(wanted * 2**64)
    else:
        distinct = np.unique(contents)
        held = contents < distinct[wanted] if wanted < len(distinct) else np.ones(len(contents), np.bool_)
    if held.all() or not held.any():
        left = "nothing to train on" if held.any() else "nothing held out"
        what = f"data.dev={spoken(wanted)} of {len(store):,} samples leaves {left}"
        raise UserError(what, where=store.parts[0].path, cure="a larger or smaller share, or data.dev=FILE")
    once = held & _first_of_each(contents, store)
    train, dev = list[SourcePart](), list[SourcePart]()
    for part, span in zip(store.parts, store.spans, strict=True):
        mine = slice(span.start, span.stop)
        train.append(part.picked(~held[mine], f"{part.key} without {wanted!r}"))
        mine = part.picked(once[mine], f"{part.key} only {wanted!r}")
        report = replace(mine.report, truncated=0, longest=0, dropped={}, bad=0, bytes=0, remarks=())
        dev.append(replace(mine, weight=1.0, report=report, damage=""))
    return Store(tuple(train)), Store(tuple(dev)), int((held & ~once).sum())


def spoken(wanted: int | float) -> str:
    """As one writes it in a config."""
    return f"{100 * wanted:g}%" if isinstance(wanted, float) else str(wanted)


def _first_of_each(contents: NDArray[np.uint64], store: Store) -> NDArray[np.bool_]:
    """The samples of the first line that has their content: a long text is several samples of one line."""
    lines = np.concatenate([part.places.astype(np.int64) + (i << 32) for i, part in enumerate(store.parts)])
    _, first, which = np.unique(contents, return_index=True, return_inverse=True)
    return lines == lines[first[which]]
