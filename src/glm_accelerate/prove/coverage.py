"""Proof that what was asked to train does train: parameters per kind of layer against what was asked."""

from collections import Counter

from torch import nn

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.adapt.lora import choose_layers
from glm_accelerate.models.adapt.quantized import count
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import linear_layers
from glm_accelerate.models.projection import projection_of
from glm_accelerate.prove.proof import Proof


def prove_coverage(model: Decoder, section: AdaptSection) -> Proof:
    """Counts, for each kind of linear layer, how many of them train."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = count(model)
    share = f"{trained:,} of {total:,} weights train ({trained / total:.2%})"
    if section.method == "prefix":
        return Proof("adapters", model.prefix is not None and trained > 0, f"a prefix: {share}")
    every = Counter(_kind(name) for name, _ in linear_layers(model))
    bound = Counter(_kind(name) for name, layer in linear_layers(model) if _trains(layer))
    if section.method == "lora":
        asked = Counter(_kind(name) for name, _ in choose_layers(model, section.targets))
    elif section.method == "full":
        asked = every
    else:
        first = len(model.layers) - section.layers
        asked = Counter(_kind(name) for name, _ in linear_layers(model) if int(name.split(".")[1]) >= first)
    said = ", ".join(f"{kind} {bound[kind]}/{every[kind]}" for kind in sorted(every))
    return Proof("adapters", bound == asked and trained > 0, f"{share}; {said}")


def _kind(name: str) -> str:
    return projection_of(name).rpartition(".")[2]


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
