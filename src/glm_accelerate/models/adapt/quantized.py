"""A frozen base kept in four or eight bits a weight: QLoRA. Linear layers inside the blocks are packed;
embedding, head, norms and biases stay as they are.
"""

from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.quantized import Kind, Packed, pack, quantized_linear, unpack
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.linear import Linear, linear_layers, replace_layers
from glm_accelerate.models.sizes import Sizes

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection


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


class QuantizedLinear(Linear):
    """A frozen linear layer whose weight is packed."""

    def __init__(self, around: Linear, kind: Kind) -> None:
        nn.Module.__init__(self)
        self.packed = PackedWeight(kind, around.weight)
        self.bias = around.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x, self.bias)

    @property
    def inputs(self) -> int:
        return self.packed.inputs

    @property
    def outputs(self) -> int:
        return self.packed.codes.shape[0]


def kind_of(section: "AdaptSection") -> Kind | None:
    """How the config wants the frozen base packed, if at all."""
    return next((kind for kind in get_args(Kind) if kind == section.base), None)


def quantize(model: Decoder, kind: Kind) -> None:
    """Pack every plain linear layer inside the blocks, in place; one of its wide weights lives at a time.

    On the device `meta` this makes the places that `load_model` fills as it reads.
    """
    plain = [name for name, layer in linear_layers(model) if type(layer) is Linear]
    replace_layers(model, plain, lambda layer: QuantizedLinear(layer, kind))


def kept_bytes(sizes: Sizes, dtype: torch.dtype, kind: Kind | None) -> int:
    """What a frozen model takes: linear layers inside the blocks as `kind`, the rest in `dtype`."""
    with torch.device("meta"):
        model = Decoder(sizes, Origin("", {}, "")).to(dtype)
    if kind is not None:
        quantize(model, kind)
    return sum(parameter.nbytes for parameter in model.parameters())


def count(model: nn.Module) -> int:
    """How many weights a model has, packed ones as what they stand for."""
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    inside = {parameter for module in packed for parameter in module.parameters()}
    plain = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    return plain + sum(module.codes.shape[0] * module.inputs for module in packed)
