"""Reading: any region of any tensor, whatever number of ranks wrote it, verified in the same pass."""

import hashlib
import json
import math
from collections.abc import Sequence
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


class Reader:
    """One checkpoint's content."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._verified: set[str] = set()  # files of schema 1

    def state(self) -> dict[str, Any]:
        """The run's own state, as it was saved."""
        entry = self.manifest.files[STATE]
        content = bytearray(entry.bytes)
        self._read_bytes(STATE, 0, memoryview(content))
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
        rest = tuple(whole - first for whole, first in zip(stored.shape, start, strict=True))
        size = tuple(shape) if shape is not None else rest
        assert all(a >= 0 and a + b <= c for a, b, c in zip(start, size, stored.shape, strict=True)), name
        region = torch.empty(size, dtype=getattr(torch, DTYPES[stored.dtype][0]))
        there = sum(self._fill(region, start, span, stored) for span in stored.pieces)
        if there != region.numel():
            raise Damaged(f"{there} of {region.numel()} items of {name} are there", where=self.directory)
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

        def box(origin: Shape) -> tuple[slice, ...]:
            return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))

        target = region[box(start)]
        if target.shape == span.shape and target.is_contiguous():
            self._read(span, stored, as_bytes(target))
        else:
            block = torch.empty(span.shape, dtype=region.dtype)
            self._read(span, stored, as_bytes(block))
            target.copy_(block[box(span.offset)])
        return target.numel()

    def _read(self, span: Span, stored: Stored, into: memoryview) -> None:
        """The bytes of a block, verified."""
        if not span.sha256 and span.file not in self._verified:  # schema 1 has digests of whole files only
            verify_file(self.directory, span.file, self.manifest.files[span.file])
            self._verified.add(span.file)
        item, compressed = DTYPES[stored.dtype][1], self.manifest.codec != "none"
        raw = memoryview(bytearray(span.end - span.begin)) if compressed else into
        if len(into) != math.prod(span.shape) * item or len(raw) != span.end - span.begin:
            raise Damaged(f"{span.file} is damaged: it holds another number of bytes", where=self.directory)
        self._read_bytes(span.file, span.begin, raw)
        if span.sha256 and hashlib.sha256(raw).hexdigest() != span.sha256:
            raise damage(span.file, self.directory)
        if compressed:
            from glm_accelerate.checkpoint.codec import decode

            into[:] = decode(raw, item, len(into))

    def _read_bytes(self, name: str, begin: int, into: memoryview) -> None:
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
