"""Reading: any region of any tensor, whatever number of ranks wrote it, verified in the same pass."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.checkpoint.format import (
    DTYPES,
    STATE,
    Damaged,
    Shape,
    Span,
    Stored,
    damage,
    read_manifest,
    verify_file,
)
from glm_accelerate.checkpoint.staging import as_bytes

Decode = Callable[[memoryview, int, int], bytes]


class Reader:
    """One checkpoint's content."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._decode = _decoder(self.manifest.codec)
        self._verified: set[str] = set()

    def state(self) -> dict[str, Any]:
        """What the run said of itself."""
        entry = self.manifest.files[STATE]
        content = self._bytes(STATE, 0, entry.bytes)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise damage(STATE, self.directory)
        return json.loads(content)

    def names(self, group: str) -> list[str]:
        """The tensors of a group."""
        return list(self.manifest.tensors.get(group, {}))

    def shapes(self, group: str) -> dict[str, Shape]:
        """Those of the whole tensors, without reading one."""
        return {name: stored.shape for name, stored in self.manifest.tensors.get(group, {}).items()}

    def tensor(
        self, group: str, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor, or the region of it that begins at `offset`. Only blocks that it touches are read."""
        stored = self.manifest.tensors[group][name]
        start = tuple(offset) if offset is not None else (0,) * len(stored.shape)
        size = tuple(shape) if shape is not None else _rest(stored.shape, start)
        assert all(a >= 0 and a + b <= c for a, b, c in zip(start, size, stored.shape, strict=True)), name
        region = torch.empty(size, dtype=getattr(torch, DTYPES[stored.dtype][0]))
        found = 0
        for span in stored.pieces:
            found += self._fill(region, start, span, stored)
        if found != region.numel():
            raise Damaged(f"{found} of {region.numel()} items of {name} are there", where=self.directory)
        return region

    def group(self, group: str) -> dict[str, Tensor]:
        """All tensors of a group."""
        return {name: self.tensor(group, name) for name in self.names(group)}

    def _fill(self, region: Tensor, start: Shape, span: Span, stored: Stored) -> int:
        """Copy what a block and the region have in common; returns the number of items."""
        low = tuple(map(max, start, span.offset))
        high = tuple(
            min(a + b, c + d) for a, b, c, d in zip(start, region.shape, span.offset, span.shape, strict=True)
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        place = region[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
        if place.shape == span.shape and place.is_contiguous():
            self._read(span, stored, as_bytes(place))
        else:
            block = torch.empty(span.shape, dtype=region.dtype)
            self._read(span, stored, as_bytes(block))
            place.copy_(
                block[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, span.offset, strict=True))]
            )
        return place.numel()

    def _read(self, span: Span, stored: Stored, into: memoryview) -> None:
        """The bytes of a block, verified."""
        if not span.sha256 and span.file not in self._verified:  # schema 1 has digests of whole files only
            verify_file(self.directory, span.file, self.manifest.files[span.file])
            self._verified.add(span.file)
        item = DTYPES[stored.dtype][1]
        raw = into if self._decode is None else memoryview(bytearray(span.end - span.begin))
        if len(into) != math.prod(span.shape) * item or len(raw) != span.end - span.begin:
            raise Damaged(f"{span.file} is damaged: it holds another number of bytes", where=self.directory)
        self._bytes_into(span.file, span.begin, raw)
        if span.sha256 and hashlib.sha256(raw).hexdigest() != span.sha256:
            raise damage(span.file, self.directory)
        if self._decode is not None:
            into[:] = self._decode(raw, item, len(into))

    def _bytes(self, name: str, begin: int, length: int) -> bytearray:
        content = bytearray(length)
        self._bytes_into(name, begin, memoryview(content))
        return content

    def _bytes_into(self, name: str, begin: int, into: memoryview) -> None:
        try:
            with (self.directory / name).open("rb", buffering=0) as file:
                file.seek(begin)
                got = 0
                while got < len(into) and (count := file.readinto(into[got:])):
                    got += count
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}", where=self.directory) from error
        if got < len(into):
            has, wanted = (self.directory / name).stat().st_size, self.manifest.files[name].bytes
            raise Damaged(f"{name} is {has} bytes, should be {wanted} bytes", where=self.directory)


def _rest(shape: Shape, start: Shape) -> Shape:
    return tuple(whole - first for whole, first in zip(shape, start, strict=True))


def _decoder(codec: str) -> Decode | None:
    if codec == "none":
        return None
    from glm_accelerate.checkpoint.codec import CODECS

    return CODECS[codec].decode
