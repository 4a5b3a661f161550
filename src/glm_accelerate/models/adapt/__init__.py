"""Choosing what of a model is trained: adapters, a prefix, its last layers, or all of it."""

from typing import TYPE_CHECKING

import torch

from glm_accelerate.models.adapt.lora import LoraSettings, add_lora
from glm_accelerate.models.adapt.prefix import add_prefix
from glm_accelerate.models.adapt.quantized import kind_of, quantize
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection


def adapt(model: Decoder, section: "AdaptSection", seed: int = 0) -> None:
    """Leave trainable what `section` asks for, freeze the rest, in place. What trains is float32.

    A base that `section` wants quantised is packed here, unless it was as it was loaded.
    """
    if (kind := kind_of(section)) is not None:
        quantize(model, kind)
    if section.method == "lora":
        add_lora(model, LoraSettings(section.rank, section.alpha, section.dropout, section.targets), seed)
    elif section.method == "prefix":
        add_prefix(model, section.prefix_tokens, section.dropout, seed)
    elif section.method == "freeze":
        _train_last(model, section.layers)
    else:
        model.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _train_last(model: Decoder, layers: int) -> None:
    if layers > len(model.layers):
        raise UserError(f"adapt.layers is {layers}, the model has {len(model.layers)}")
    model.requires_grad_(False)
    for block in model.layers[-layers:]:
        block.requires_grad_(True)
    model.layers[:-layers].requires_grad_(False)  # projections that a frozen layer has, too, stay
