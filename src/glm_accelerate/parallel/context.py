"""Documents longer than a rank holds, shared by neighbours: each has two pieces of one, and the others' keys
and values while a layer runs. A layer gathers once forward, and sums their gradients once backward.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from glm_accelerate.data.pack import pieces_of
from glm_accelerate.data.types import Piece
from glm_accelerate.models.attention import Attention
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.parallel.exchange import exchanged
from glm_accelerate.parallel.place import Place


def share_documents(model: Decoder, place: Place) -> None:
    """Let the attention of a model see what neighbours have of a document. All ranks call it together."""
    neighbours = next(group for group in place.axes.sharing() if place.ranks.rank in group)
    group = dist.new_group(neighbours, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    sharing = SharedDocuments(group, place.axes.context)
    for part in model.modules():
        if isinstance(part, Attention):
            part.sharing = sharing


@dataclass(frozen=True, slots=True)
class Slot:
    """Where some tokens lie among those of all ranks: `count` rows from `first` of a rank's."""

    rank: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SharedDocuments:
    """`ranks` processes that share documents."""

    group: ProcessGroup
    ranks: int

    def gather(self, k_BTKD: Tensor, v_BTKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The keys and values that each document of the layout sees, one after the other."""
        own = sum(map(len, layout.pieces))
        pieces, rest = zip(*(x.flatten(0, 1).tensor_split((own,)) for x in (k_BTKD, v_BTKD)), strict=True)
        seen: Any = _Gather.apply(torch.cat(pieces, -1), self, layout.pieces)
        k_SKD, v_SKD = map(torch.cat, zip(seen.chunk(2, -1), rest, strict=True))
        return k_SKD, v_SKD


@lru_cache(16)
def _lie(pieces: tuple[Piece, ...], ranks: int) -> tuple[int, tuple[Slot, ...]]:
    """The most tokens that any of the ranks has of these documents; where those lie that each piece sees, its
    own included: of its document from the start on.
    """
    first, slots = [0] * ranks, list[Slot]()
    for early, late in zip(pieces[::2], pieces[1::2], strict=True):
        of_document: list[tuple[int, Slot]] = []  # and where each begins
        for rank in range(ranks):
            for piece in pieces_of(early.place, early.whole, ranks, rank):
                of_document.append((piece.start, Slot(rank, first[rank], len(piece))))
                first[rank] += len(piece)
        of_document.sort(key=lambda found: found[0])
        slots += [slot for piece in (early, late) for start, slot in of_document if start < piece.stop]
    return max(first), tuple(slots)


def _seen(own: Tensor, sharing: SharedDocuments, pieces: tuple[Piece, ...]) -> Tensor:
    """What this rank's pieces see, of the pieces of all."""
    most, slots = _lie(pieces, sharing.ranks)
    sent = own.new_zeros(most, *own.shape[1:])
    sent[: len(own)] = own
    of_ranks = own.new_empty(sharing.ranks, *sent.shape)
    # As bytes, which every backend carries.
    dist.all_gather(list(of_ranks.view(torch.uint8)), sent.view(torch.uint8), group=sharing.group)
    return torch.cat([of_ranks[each.rank].narrow(0, each.first, each.count) for each in slots])


class _Gather(torch.autograd.Function):
    """The gradient of a token is the sum of all that saw it, in float32 at the least."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sharing: SharedDocuments, pieces: tuple[Piece, ...]) -> Tensor:
        ctx.sharing, ctx.pieces, ctx.own, ctx.dtype = sharing, pieces, len(own), own.dtype
        return exchanged(lambda own: _seen(own, sharing, pieces), own)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        sharing, pieces, grad = ctx.sharing, ctx.pieces, grads[0]
        most, slots = _lie(pieces, sharing.ranks)
        wide = torch.promote_types(ctx.dtype, torch.float32)
        of_ranks = torch.zeros(sharing.ranks, most, *grad.shape[1:], dtype=wide, device=grad.device)
        for slot, part in zip(slots, grad.split([slot.count for slot in slots]), strict=True):
            of_ranks[slot.rank].narrow(0, slot.first, slot.count).add_(part)
        summed = torch.empty_like(of_ranks[0])
        dist.reduce_scatter(summed, list(of_ranks), group=sharing.group)
        return summed[: ctx.own].to(ctx.dtype), None, None
