"""A weight in four or eight bits a number, as a module."""

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.quantized import Kind, Packed, pack, quantized_linear, unpack


class PackedWeight(nn.Module):
    """A weight in few bits. Its parts are parameters with a row for each output, which ranks can divide."""

    def __init__(self, kind: Kind, weight_OI: Tensor) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.fill(weight_OI)

    def fill(self, weight_OI: Tensor) -> None:
        """Pack this weight in place of the one before."""
        packed = pack(self.kind, weight_OI.detach())
        self.inputs = packed.inputs
        self.codes = nn.Parameter(packed.codes_OP, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        levels = packed.levels_OK
        self.levels = None if levels is None else nn.Parameter(levels, requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, self._packed(), None if bias is None else bias.to(x.dtype))

    def wide(self, dtype: torch.dtype) -> Tensor:
        """What it stands for."""
        return unpack(self._packed(), dtype)

    def _packed(self) -> Packed:
        return Packed(self.kind, self.inputs, self.codes, self.scales, self.levels)
