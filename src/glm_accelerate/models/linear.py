"""A linear layer that computes in the dtype of its input, whatever dtype its weights are kept in.

So float32 master weights train with bfloat16 products, with no autocast state and no second model.
"""

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.product import linear


class Linear(nn.Module):
    """out = x @ weight.T + bias. Made empty: weights are loaded or initialised from outside."""

    native = False  # set by `models.bind`: products by our own code

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.native)

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]
