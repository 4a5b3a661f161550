"""Activations that wait in host memory for the backward pass: for any module, applied from outside.

forward: saved -> copied out -> let go ...   backward: ... fetched ahead of need -> used -> dropped
What is moved is memory, not tensors: views of one piece of memory (a tensor saved twice, the parts of a
split, a transpose) travel together, once, and come back with the same strides: the same bits are computed.
"""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from glm_accelerate.memory.stream import Copy, Lane, Window
from glm_accelerate.runtime.device import resolved

LEAST = 2**20  # bytes below which moving is not worth its start
ROOM = 2**28  # bytes


@contextmanager
def offload_activations(
    model: nn.Module, device: torch.device, *, least: int = LEAST, room: int = ROOM, lane: Lane | None = None
) -> Generator[None, None, None]:
    """Around a forward pass. What it saves on `device` goes to the host; parameters and buffers of `model`,
    and what is smaller than `least` bytes, stay.

    `room`: so many bytes, or one tensor, may be on their way out, and as many on their way back. The last
    ones to leave are the first to be needed: they never go.
    """
    device = resolved(device)
    tape = _Tape(model, device, least, room, lane or Lane(device))
    with saved_tensors_hooks(tape.pack, tape.unpack):
        yield
    tape.close()


class _Piece:
    """One piece of memory that left. It lives as long as something in the graph needs it."""

    def __init__(self, out: Copy, place: int) -> None:
        self.out, self.place = out, place
        self.back: Copy | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, as a view of its piece of memory."""

    piece: _Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Tape:
    """What one forward pass saved, in order."""

    def __init__(self, model: nn.Module, device: torch.device, least: int, room: int, lane: Lane) -> None:
        self.device, self.least, self.room, self.lane = device, least, room, lane
        plain = [t for t in (*model.parameters(), *model.buffers()) if type(t) in (nn.Parameter, Tensor)]
        self.staying = {StorageWeakRef(tensor.untyped_storage()) for tensor in plain}
        self.leaving = Window(room)
        self.pieces: list[weakref.ref[_Piece]] = []
        # By version too: memory that was written to since is another piece.
        self.known: dict[tuple[StorageWeakRef, int], _Piece] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._moves(tensor):
            return tensor.detach()  # never the tensor itself: a result would hold the graph that holds it
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version
        piece = self.known.get(key)
        if piece is None:
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            piece = self.known[key] = _Piece(self.lane.to_host(flat), len(self.pieces))
            self.pieces.append(weakref.ref(piece))
            self.leaving.add(piece.out)
        return _View(piece, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        memory = self._here(saved.piece).wait().untyped_storage()
        self._fetch_before(saved.piece.place)
        view = torch.empty(0, dtype=saved.dtype, device=self.device)
        return view.set_(memory, saved.offset, saved.shape, saved.stride)

    def close(self) -> None:
        """The forward pass is over. What is still here has no need to leave."""
        for copy in self.leaving.copies:
            assert copy.source is not None
        self.leaving.forget()
        self.known.clear()

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self.device or tensor.is_conj() or tensor.is_neg():
            return False
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        small = storage.nbytes() < self.least
        return not (small or isinstance(base, nn.Parameter) or StorageWeakRef(storage) in self.staying)

    def _here(self, piece: _Piece) -> Copy:
        if piece.out.source is not None:
            return Copy(None, piece.out.source, None)
        if piece.back is None:
            piece.back = self.lane.to_device(piece.out.result)
        return piece.back

    def _fetch_before(self, place: int) -> None:
        """Start to fetch what was saved before this: it is needed after it."""
        ahead = 0
        while ahead < self.room and place > 0:
            place -= 1
            piece = self.pieces[place]()
            if piece is not None and piece.out.source is None:
                self._here(piece)
                ahead += piece.out.result.nbytes
