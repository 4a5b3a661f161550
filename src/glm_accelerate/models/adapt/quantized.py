"""A frozen base kept in four or eight bits a weight: QLoRA. Linear layers inside the blocks are packed;
embedding, head, norms and biases stay as they are.
"""

from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.linear import linear_layers
from glm_accelerate.models.packed import PackedWeight
from glm_accelerate.models.sizes import Sizes

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection


def kind_of(section: "AdaptSection") -> Kind | None:
    """How the config wants the frozen base packed, if at all."""
    return next((kind for kind in get_args(Kind) if kind == section.base), None)


def quantize(model: Decoder, kind: Kind) -> None:
    """Pack every plain linear layer inside the blocks, in place; one of its wide weights lives at a time.

    On the device `meta` this makes the places that `load_model` fills as it reads.
    """
    for _, layer in linear_layers(model):
        if layer.packed is None:
            layer.pack(kind)


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
