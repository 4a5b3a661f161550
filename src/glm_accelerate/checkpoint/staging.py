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

from glm_accelerate.checkpoint.format import DTYPES
from glm_accelerate.checkpoint.write import ALIGN, PieceEntry, Source
from glm_accelerate.parallel.part import Part
from glm_accelerate.runtime.device import device_of

Pieces = Mapping[str, Mapping[str, Part]]  # by group and name

NAMES = {getattr(torch, name): key for key, (name, _) in DTYPES.items()}


def plan(groups: Pieces) -> list[tuple[PieceEntry, Tensor]]:
    """The pieces that a rank writes, each with its tensor, and where their bytes go in a copy."""
    planned: list[tuple[PieceEntry, Tensor]] = []
    begin = 0
    for group, name, part in _nonempty(groups):
        tensor, size = part.local.detach(), tuple(part.local.shape)
        extent = size
        if part.rows:
            assert sum(stop - start for start, stop in part.rows) == size[0]
            extent = part.rows[-1][1] - part.offset[0], *size[1:]
        ends = zip(part.offset, extent, part.shape, strict=True)
        assert all(first + count <= whole for first, count, whole in ends), f"{name} goes beyond its whole"
        dtype = NAMES[tensor.dtype]
        piece = PieceEntry(group, name, dtype, part.shape, part.offset, size, begin, tensor.nbytes, part.rows)
        planned.append((piece, tensor))
        begin += math.ceil(tensor.nbytes / ALIGN) * ALIGN
    return planned


def in_place(planned: list[tuple[PieceEntry, Tensor]]) -> Source:
    """The bytes of the tensors themselves, one at a time brought to the CPU."""
    tensors = {(piece.group, piece.name): tensor for piece, tensor in planned}
    return lambda piece: as_bytes(tensors[piece.group, piece.name].cpu().contiguous())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Staging:
    """One copy of the state."""

    def __init__(self, groups: Pieces, folder: Path) -> None:
        planned = plan(groups)
        self._pieces = [piece for piece, _ in planned]
        devices = {tensor.device for _, tensor in planned}
        self._devices = [device for device in map(device_of, devices) if device.streams]
        size = max(1, sum(math.ceil(piece.bytes / ALIGN) * ALIGN for piece in self._pieces))
        self.data, self.job = _memory("data", folder), _memory("job", folder)
        os.ftruncate(self.data, size)
        self._flat = torch.frombuffer(mmap.mmap(self.data, size), dtype=torch.uint8)
        self._flat[:: mmap.PAGESIZE] = 0
        # Why its pages are not locked, where they should be.
        self.unlocked = self._devices[0].lock_pages(self._flat) if self._devices else None
        self._locked = bool(self._devices) and self.unlocked is None
        self._views = [
            self._flat[piece.begin : piece.begin + piece.bytes].view(tensor.dtype).view(tensor.shape)
            for piece, tensor in planned
        ]
        self._described = json.dumps([asdict(piece) for piece in self._pieces]).encode() + b"\n"

    def fits(self, groups: Pieces) -> bool:
        """Whether these are the tensors that it was made for."""
        return [piece for piece, _ in plan(groups)] == self._pieces

    def copy(self, groups: Pieces) -> None:
        """Take the state as it is now. When this returns the tensors may change."""
        with torch.no_grad():
            for (_, _, part), view in zip(_nonempty(groups), self._views, strict=True):
                view.copy_(part.local, non_blocking=True)
        for device in self._devices:
            torch.get_device_module(device.device).current_stream(device.device).synchronize()

    def leave(self, job: bytes) -> None:
        """Leave the writer its job. In a file, because a pipe that nobody reads would make training wait."""
        os.ftruncate(self.job, 0)
        os.pwrite(self.job, self._described + job, 0)

    def close(self) -> None:
        """Give the memory back."""
        if self._locked:
            self._devices[0].unlock_pages(self._flat)
        self._views.clear()
        del self._flat
        os.close(self.data)
        os.close(self.job)


def _nonempty(groups: Pieces) -> Iterator[tuple[str, str, Part]]:
    """Every part that holds something. Of a tensor without items, the part that begins it."""
    for group, parts in groups.items():
        for name, part in parts.items():
            if part.local.numel() or (not math.prod(part.shape) and not any(part.offset)):
                yield group, name, part


def _memory(name: str, folder: Path) -> int:
    """A descriptor of memory that another process can share; where there is none, of a nameless file."""
    if sys.platform == "linux":
        return os.memfd_create(f"checkpoint-{name}")
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
