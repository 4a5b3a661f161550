"""The shapes of a model's weights, read from the model itself without its numbers: what plans count by."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.linear import Linear, LowRank, projection_of
from glm_accelerate.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class LinearShape:
    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """A projection of a block: its layers, two if it is factored; and all blocks that share it."""

    name: str  # as `down_proj`
    layers: tuple[LinearShape, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The projections of each block, in the order in which they run, and the number of all weights."""

    blocks: tuple[tuple[ProjectionShape, ...], ...]
    parameters: int

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with in all blocks: shared ones once for each block."""
        return sum(self.of_block(block) for block in range(len(self.blocks)))

    def of_block(self, block: int) -> int:
        """Weights that a token is multiplied with in one block."""
        return sum(layer.weights for each in self.blocks[block] for layer in each.layers)


@lru_cache(maxsize=64)
def shapes_of(sizes: Sizes) -> Shapes:
    """The shapes of a model of these sizes."""
    with torch.device("meta"):
        model = Decoder(sizes, Origin("", {}, ""))
    named = [dict(_projections(block)) for block in model.layers]
    owners: defaultdict[nn.Module, list[int]] = defaultdict(list)
    for number, projections in enumerate(named):
        for module in projections.values():
            owners[module].append(number)
    blocks = (
        tuple(
            ProjectionShape(name, tuple(_layers(module)), tuple(owners[module]))
            for name, module in projections.items()
        )
        for projections in named
    )
    return Shapes(tuple(blocks), sum(parameter.numel() for parameter in model.parameters()))


def _projections(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in block.named_modules():
        if isinstance(module, Linear | LowRank) and projection_of(name) == name:
            yield name.rpartition(".")[2], module


def _layers(module: nn.Module) -> Iterator[LinearShape]:
    for layer in module.modules():
        if isinstance(layer, Linear):
            yield LinearShape(layer.inputs, layer.outputs, layer.bias is not None)
