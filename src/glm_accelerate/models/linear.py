"""A linear layer that computes in the dtype of its input, whatever dtype its weights are kept in.

So float32 master weights train with bfloat16 products, with no autocast state and no second model.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from glm_accelerate.kernels.master_linear import Kept, master_linear


class Linear(nn.Module):
    """out = x @ weight.T + bias. Made empty: weights are loaded or initialised from outside."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.kept: Kept | None = None  # set from outside: memory for casts, kept from step to step

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.kept is not None and self.training:
            return master_linear(x, self.weight, bias, self.kept)
        return linear(x, self.weight.to(x.dtype), bias)

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


def keep_casts(model: nn.Module, compute: torch.dtype) -> None:
    """Gives every layer that trains in a wider dtype than `compute` memory for its casts."""
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.weight.requires_grad and layer.weight.dtype != compute:
            layer.kept = Kept.of(layer.weight, compute)
