"""The memory into which a save copies the state, made and touched once, shared with the writer process.

Fresh pages cost many times the copy itself, so none is left for the first save. For a GPU they are locked, if
the system lets them be.
"""

import json
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from glm_accelerate.checkpoint.files import ALIGN, PieceEntry, Source
from glm_accelerate.checkpoint.format import DTYPES, Piece
from glm_accelerate.runtime.device import device_of

Pieces = Mapping[str, Mapping[str, Piece]]  # by group and name

NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}


def plan(groups: Pieces) -> list[tuple[PieceEntry, Tensor]]:
    """The parts that a rank writes, each with its tensor, and where their bytes go in a copy."""
    planned: list[tuple[PieceEntry, Tensor]] = []
    place = 0
    for group, name, piece in _each(groups):
        tensor = piece.tensor.detach()
        ends = zip(piece.offset, _extent(piece), piece.shape, strict=True)
        assert all(first + count <= whole for first, count, whole in ends), f"{name} goes beyond its whole"
        length = tensor.numel() * tensor.element_size()
        part = PieceEntry(
            group,
            name,
            NAMES[tensor.dtype],
            piece.shape,
            piece.offset,
            tuple(tensor.shape),
            place,
            length,
            piece.rows,
        )
        planned.append((part, tensor))
        place += math.ceil(length / ALIGN) * ALIGN
    return planned


def in_place(planned: list[tuple[PieceEntry, Tensor]]) -> Source:
    """The bytes of the tensors themselves, one at a time brought to the CPU."""
    tensors = {(part.group, part.name): tensor for part, tensor in planned}
    return lambda part: as_bytes(tensors[part.group, part.name].cpu().contiguous())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Staging:
    """One copy of the state."""

    def __init__(self, groups: Pieces, folder: Path) -> None:
        planned = plan(groups)
        parts = [part for part, _ in planned]
        devices = {tensor.device for _, tensor in planned}
        self._devices = [device for device in map(device_of, devices) if device.streams]
        self.bytes = max(1, sum(math.ceil(part.bytes / ALIGN) * ALIGN for part in parts))
        self.data, self.words = _memory("data", folder), _memory("words", folder)
        os.ftruncate(self.data, self.bytes)
        self._flat = torch.frombuffer(mmap.mmap(self.data, self.bytes), dtype=torch.uint8)
        self._flat[:: mmap.PAGESIZE] = 0
        # Why its pages are not locked, where they should be.
        self.unlocked = self._devices[0].lock_pages(self._flat) if self._devices else None
        self._locked = bool(self._devices) and self.unlocked is None
        self._views = [
            self._flat[part.begin : part.begin + part.bytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in planned
        ]
        self._parts = parts
        self._said = json.dumps([asdict(part) for part in parts]).encode() + b"\n"

    def fits(self, groups: Pieces) -> bool:
        """Whether these are the tensors that it was made for."""
        pieces = list(_each(groups))
        return len(pieces) == len(self._parts) and all(
            part.name == name
            and part.group == group
            and view.dtype == piece.tensor.dtype
            and part.offset == piece.offset
            and view.shape == piece.tensor.shape
            and part.shape == piece.shape
            and part.rows == piece.rows
            for (group, name, piece), part, view in zip(pieces, self._parts, self._views, strict=True)
        )

    def copy(self, groups: Pieces) -> None:
        """Take the state as it is now. When this returns the tensors may change."""
        with torch.no_grad():
            for (_, _, piece), view in zip(_each(groups), self._views, strict=True):
                view.copy_(piece.tensor, non_blocking=True)
        for device in self._devices:
            torch.get_device_module(device.device).current_stream(device.device).synchronize()

    def tell(self, job: bytes) -> None:
        """Leave the writer its task. In a file, because a pipe that nobody reads would make training wait."""
        os.ftruncate(self.words, 0)
        os.pwrite(self.words, self._said + job, 0)

    def close(self) -> None:
        """Give the memory back."""
        if self._locked:
            self._devices[0].unlock_pages(self._flat)
        self._views.clear()
        del self._flat
        os.close(self.data)
        os.close(self.words)


def _extent(piece: Piece) -> tuple[int, ...]:
    """From its offset to its end."""
    if not piece.rows:
        return tuple(piece.tensor.shape)
    assert sum(stop - start for start, stop in piece.rows) == piece.tensor.shape[0]
    return piece.rows[-1][1] - piece.offset[0], *piece.tensor.shape[1:]


def _each(groups: Pieces) -> Iterator[tuple[str, str, Piece]]:
    """Every piece that holds something. Of a tensor without items, the piece that begins it."""
    for group, pieces in groups.items():
        for name, piece in pieces.items():
            if piece.tensor.numel() or (not math.prod(piece.shape) and not any(piece.offset)):
                yield group, name, piece


def _memory(name: str, folder: Path) -> int:
    """A descriptor of memory that another process can share; where there is none, of a nameless file."""
    if sys.platform == "linux":
        return os.memfd_create(f"checkpoint-{name}")
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
