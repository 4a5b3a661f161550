"""The projections of a block: a linear layer, or two thin ones where `Sizes.ranks` says so.

Letters: R rank.
"""

from torch import Tensor, nn

from glm_accelerate.models.linear import Linear
from glm_accelerate.models.sizes import Sizes


class LowRank(nn.Module):
    """out = (x @ inner.T) @ outer.T + bias: two ordinary layers, quantised, adapted and trained as such."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.inner, self.outer = Linear(inputs, rank, bias=False), Linear(rank, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def projection(sizes: Sizes, name: str, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    """The layer of that name, as `layers.0.mlp.down_proj`."""
    rank = sizes.ranks.get(name)
    return Linear(inputs, outputs, bias) if rank is None else LowRank(inputs, outputs, rank, bias)


def projection_of(layer: str) -> str:
    """The name of the projection that a linear layer is, or is a half of."""
    return layer.removesuffix(".inner").removesuffix(".outer")
