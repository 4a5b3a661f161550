"""What a pass costs on this device: so much by itself, so much a token, so much the square of a document."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from glm_accelerate.data.pack import aligned
from glm_accelerate.data.types import DOCUMENT_ALIGNMENT, Batch
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.parallel.place import ORDER, Place
from glm_accelerate.parallel.shard import gathered
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import device_of

MOST_TIMED, REPEATS, PARTS = 8192, 3, 8  # tokens of a pass that is timed, how often, its documents


@dataclass(frozen=True, slots=True)
class PassCost:
    """In tokens: each of them costs 1."""

    started: float = 0.0
    square: float = 0.0  # for the square of each document's length

    def of(self, batch: Batch) -> float:
        """Of a batch, padding and all."""
        whole = [length for row in batch.documents for length in row][len(batch.pieces) :]
        tokens = sum(whole) + sum(map(len, batch.pieces))
        squares = sum(length**2 for length in whole) + sum(len(each) * each.whole for each in batch.pieces)
        return self.started + tokens + self.square * squares

    @classmethod
    def fitted(cls, tokens: int, one: float, parts: float, least: float) -> "PassCost | None":
        """From the seconds of one document of so many tokens, of as many in equal parts, and of one of the
        fewest; None where they say nothing.
        """
        square = max(0.0, one - parts) / (tokens**2 * (1 - 1 / PARTS))
        each = (parts - square * tokens**2 / PARTS - least) / (tokens - DOCUMENT_ALIGNMENT)
        if each <= 0:
            return None
        return cls(max(0.0, least / each - DOCUMENT_ALIGNMENT), square / each)


def timed(model: Decoder, plan: RunPlan, place: Place) -> tuple[PassCost, PassCost] | None:
    """Of a forward pass, and of one there and back: of the last block, the median of all ranks, which time it
    together. None where blocks cannot be run alone, or passes are too short to tell.
    """
    tokens = min(MOST_TIMED, aligned(plan.micro_tokens, PARTS * DOCUMENT_ALIGNMENT))
    alone = not plan.offload and (model.sizes.plain or plan.shards == 1)
    if not alone or tokens <= PARTS * DOCUMENT_ALIGNMENT:
        return None
    shapes = (tokens,), (tokens // PARTS,) * PARTS, (DOCUMENT_ALIGNMENT,)
    training = model.training
    model.train()
    with gathered(block := list(model.layers)[-1]), device_of(model.embed.device).fork_random():
        taken = [_seconds(model, block, shape) for shape in shapes]
    model.train(training)
    costs: list[PassCost] = []
    for seconds in zip(*taken, strict=True):
        own = PassCost.fitted(tokens, *seconds)
        every = of_all(place, own is not None, own.started if own else 0.0, own.square if own else 0.0)
        known = [(started, square) for there, started, square in every if there]
        if not known:
            return None
        started, square = (median(each) for each in zip(*known, strict=True))
        costs.append(PassCost(started, square))
    return costs[0], costs[1]


def of_all(place: Place, *own: float) -> list[tuple[float, ...]]:
    """Every rank's figures, by rank, on all of them."""
    size, count = len(own), place.count(*ORDER)
    figures = [0.0] * (size * count)
    figures[place.ranks.rank * size : (place.ranks.rank + 1) * size] = own
    summed = place.ranks.total(figures)
    return [tuple(summed[rank * size : (rank + 1) * size]) for rank in range(count)]


def _seconds(model: Decoder, block: torch.nn.Module, documents: Sequence[int]) -> tuple[float, float]:
    """Of the quickest of some passes through a block: forward, and with the way back."""
    device, clock = model.embed.device, device_of(model.embed.device).clock
    layout = Layout.of_documents([tuple(documents)], device)
    table = rope_table(layout.positions_BT, model.sizes.rope_width, model.sizes.rope_theta)
    shape = (1, model.tokens_here(sum(documents)), model.sizes.width)
    x_BTH = torch.randn(shape, dtype=model.compute or model.embed.dtype, device=device, requires_grad=True)
    inputs: list[Tensor] = [x_BTH, *(one for one in block.parameters() if one.requires_grad)]
    forward: list[float] = []
    both: list[float] = []
    for _ in range(REPEATS + 1):  # the first sets up
        begun = clock()
        out = block.forward(x_BTH, layout, table, None, None)
        forward.append(clock() - begun)
        torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
        both.append(clock() - begun)
    return min(forward), min(both)
