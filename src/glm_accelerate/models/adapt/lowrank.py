"""Large matrices as products of two thin ones: W ~ outer inner, at the rank that keeps a share of W's energy.

Letters: O outputs, I inputs, R rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear

MULTIPLE = 16  # ranks are rounded up to it: tiles of matrix products are no finer


class LowRank(nn.Module):
    """out = (x @ inner.T) @ outer.T + bias: two ordinary layers, bound and trained as such."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))

    @property
    def rank(self) -> int:
        return self.inner.outputs

    @torch.no_grad()
    def multiplied(self) -> Linear:
        """The plain layer that computes the same."""
        wide_OI = self.outer.weight.float() @ self.inner.weight.float()
        return holding(wide_OI.to(self.outer.weight.dtype), self.outer.bias)


def holding(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """A plain, frozen layer with these weights."""
    with torch.device("meta"):
        made = Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    made.weight = nn.Parameter(weight_OI.detach(), requires_grad=False)
    made.bias = None if bias_O is None else nn.Parameter(bias_O.detach(), requires_grad=False)
    return made


def empty(layer: Linear, rank: int) -> LowRank:
    """Two thin matrices in the place of a layer, to be filled: until then every result is NaN."""
    inner_RI = torch.full_like(layer.weight[:1], float("nan")).expand(rank, -1).contiguous()
    outer_OR = torch.full_like(layer.weight[:, :1], float("nan")).expand(-1, rank).contiguous()
    return LowRank(holding(inner_RI, None), holding(outer_OR, layer.bias))


@torch.no_grad()
def factored(layer: Linear, energy: float) -> LowRank | None:
    """The best two matrices (Eckart, Young) at the least rank that keeps `energy`, a share of the squared
    singular values' sum; None where they would hold no fewer weights. Both carry each value's root.
    """
    outputs, inputs = layer.weight.shape
    wide_OI = layer.weight.double()
    short_SL = wide_OI if outputs <= inputs else wide_OI.T
    # The squares of all singular values for a tenth of an SVD's time; double, since they are squares.
    squares_S, basis_SS = torch.linalg.eigh(short_SL @ short_SL.T)
    rank = rank_for(squares_S.flip(0), energy)
    if rank * (outputs + inputs) >= outputs * inputs:
        return None
    basis_SR = basis_SS[:, -rank:].flip(1)
    rest_RL = basis_SR.T @ short_SL
    root_R = rest_RL.norm(dim=1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    pair = basis_SR * root_R, rest_RL / root_R[:, None]
    outer_OR, inner_RI = pair if outputs <= inputs else (pair[1].T, pair[0].T)
    dtype = layer.weight.dtype
    return LowRank(
        holding(inner_RI.to(dtype).contiguous(), None), holding(outer_OR.to(dtype).contiguous(), layer.bias)
    )


def rank_for(squares: Tensor, energy: float) -> int:
    """How many of these squares (falling) make up the share `energy` of their sum, rounded up."""
    sums = squares.clamp(min=0).cpu().cumsum(0)  # on a GPU it has no deterministic form
    needed = int((sums < energy * sums[-1]).sum()) + 1
    return -(-needed // MULTIPLE) * MULTIPLE


def factor(model: Decoder, energy: float) -> None:
    """Factor every linear layer inside the blocks that gets smaller by it, in place, one at a time."""
    replace(model, lambda _, layer: factored(layer, energy) if isinstance(layer, Linear) else None)


def multiply_out(model: Decoder) -> None:
    """Plain layers again, in place."""
    replace(model, lambda _, layer: layer.multiplied() if isinstance(layer, LowRank) else None)


def factors(model: Decoder) -> dict[str, LowRank]:
    """Every factored layer by its first name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LowRank)}


def replace(model: Decoder, make: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Put `make(name, layer)`, unless that is None, in the place of each layer inside the blocks; of one that
    several blocks share, once, in all its places. The one before is let go of at once.
    """
    names: dict[int, str] = {}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, owner in model.layers.named_modules(prefix="layers"):
        for leaf, layer in owner.named_children() if not isinstance(owner, LowRank) else ():
            name = names.setdefault(id(layer), f"{path}.{leaf}")
            places.setdefault(name, []).append((owner, leaf))
    for name, found in places.items():
        made = make(name, model.get_submodule(name))
        for owner, leaf in found if made is not None else ():
            setattr(owner, leaf, made)
