"""LoRA: out = x W^T + (alpha / rank) * dropout(x) A^T B^T, with W frozen and A, B small and float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.lora import add_adapter, lora_linear
from glm_accelerate.models.adapt.quantized import QuantizedLinear
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.families import FAMILIES, Family
from glm_accelerate.models.linear import Linear, linear_layers, replace_layers
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


class LoraLinear(Linear):
    """A linear layer that keeps its own names and adds lora_A (rank x inputs) and lora_B (outputs x rank)."""

    def __init__(self, around: Linear, settings: LoraSettings, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = around.weight, around.bias
        self._begin(around, settings, generator)

    def _begin(self, around: Linear, settings: LoraSettings, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(around.inputs)  # what kaiming_uniform(a=sqrt(5)) comes to
        A = torch.empty(settings.rank, around.inputs).uniform_(-bound, bound, generator=generator)
        beside = next(around.parameters())
        device = "cpu" if beside.is_meta else beside.device  # its weights may come later
        self.lora_A = nn.Parameter(A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(around.outputs, settings.rank, device=device))
        self.scale, self.share = settings.scale, settings.dropout

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        share = self.share if self.training else 0.0
        adapter = (self.lora_A, self.lora_B)
        return lora_linear(x, weight, bias, *adapter, scale=self.scale, dropout=share, native=self.native)

    def merged(self) -> Linear:
        """The plain layer that computes the same without dropout."""
        with torch.device("meta"):
            plain = Linear(self.inputs, self.outputs, bias=False)
        delta = self.scale * (self.lora_B.float() @ self.lora_A.float())
        plain.weight = nn.Parameter((self.weight.float() + delta).to(self.weight.dtype), requires_grad=False)
        plain.bias = self.bias
        return plain

    @property
    def inputs(self) -> int:
        return self.lora_A.shape[1]

    @property
    def outputs(self) -> int:
        return self.lora_B.shape[0]


class QuantizedLora(LoraLinear):
    """The same beside a packed weight."""

    def __init__(self, around: QuantizedLinear, settings: LoraSettings, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.packed, self.bias = around.packed, around.bias
        self._begin(around, settings, generator)

    def forward(self, x: Tensor) -> Tensor:
        out, share = self.packed(x, self.bias), self.share if self.training else 0.0
        return add_adapter(out, x, self.lora_A, self.lora_B, scale=self.scale, dropout=share)

    def merged(self) -> Linear:
        raise UserError(
            "a quantised base takes no adapter in", cure="merge into the model as its files have it"
        )


def adapted_layers(model: Decoder) -> list[tuple[str, LoraLinear]]:
    """Every layer that has an adapter."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]


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

    def adapted(layer: Linear) -> LoraLinear:
        if isinstance(layer, QuantizedLinear):
            return QuantizedLora(layer, settings, generator)
        return LoraLinear(layer, settings, generator)

    replace_layers(model, [name for name, _ in choose_layers(model, settings.targets)], adapted)


def merge(model: Decoder) -> None:
    """Add every adapter into its layer and drop it, in place."""

    def merged(layer: Linear) -> Linear:
        assert isinstance(layer, LoraLinear)
        return layer.merged()

    replace_layers(model, [name for name, _ in adapted_layers(model)], merged)
