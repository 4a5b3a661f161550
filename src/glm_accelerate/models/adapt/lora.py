"""LoRA: out = x W^T + (alpha / rank) * dropout(x) A^T B^T, with W frozen and A, B small and float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.families import FAMILIES, Family
from glm_accelerate.models.linear import Adapter, Linear, linear_layers
from glm_accelerate.models.projection import projection_of
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """`targets` names layers by the end of their name, ours or the checkpoint's; "all-linear": every one."""

    rank: int = 8
    alpha: float = 32.0
    dropout: float = 0.1
    targets: str | Sequence[str] = "all-linear"
    root_scale: bool = False  # alpha / sqrt(rank), as adapters trained with rsLoRA have it

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.root_scale else self.rank)


def adapted_layers(model: Decoder) -> list[tuple[str, Linear]]:
    """Every layer that has an adapter."""
    return [(name, layer) for name, layer in linear_layers(model) if layer.adapter is not None]


def choose_layers(model: Decoder, targets: str | Sequence[str]) -> list[tuple[str, Linear]]:
    """The layers that `targets` names. A name that matches nothing is an error that lists what there is."""
    every = linear_layers(model)
    if targets == "all-linear":
        return every
    family = FAMILIES[model.origin.family]
    asked = [targets] if isinstance(targets, str) else list(targets)
    chosen: list[tuple[str, Linear]] = []
    for name, layer in every:
        if any(spelling.endswith(f".{target}") for spelling in _spellings(name, family) for target in asked):
            chosen.append((name, layer))
    endings = {spelling for name, _ in every for spelling in _spellings(name, family)}
    for target in asked:
        if not any(ending.endswith(f".{target}") for ending in endings):
            there = sorted({ending.rpartition(".")[2] for ending in endings})
            raise UserError(
                f"adapt.targets: no layer is called {target!r}", cure=f"there are {', '.join(there)}"
            )
    return chosen


def _spellings(name: str, family: Family) -> set[str]:
    """The names of a layer, and of the projection that it may be a half of: ours and the family's."""
    whole = projection_of(name)
    return {f".{each}" for each in (name, family.module(name), whole, family.module(whole))}


def add_lora(model: Decoder, settings: LoraSettings, seed: int = 0) -> None:
    """Freeze the model and put adapters into it, in place."""
    if adapted_layers(model):
        raise UserError("the model has adapters already", cure="merge them first")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    adapter = Adapter(settings.scale, settings.dropout)
    for _, layer in choose_layers(model, settings.targets):
        bound = 1 / math.sqrt(layer.inputs)  # what kaiming_uniform(a=sqrt(5)) comes to
        A = torch.empty(settings.rank, layer.inputs).uniform_(-bound, bound, generator=generator)
        beside = next(layer.parameters())
        device = "cpu" if beside.is_meta else beside.device  # its weights may come later
        layer.adapt(A.to(device), torch.zeros(layer.outputs, settings.rank, device=device), adapter)


def merge(model: Decoder) -> None:
    """Add every adapter into its layer and drop it, in place."""
    for _, layer in adapted_layers(model):
        layer.merge()
