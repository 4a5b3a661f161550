"""Choosing what of a model is trained: LoRA, a prefix, its last layers, or all of it; and a base in few bits.

LoRA: out = x W^T + (alpha / rank) * dropout(x) A^T B^T, with W frozen and A, B small and float32.
Letters: P prefix tokens, L layers, K key/value heads, D head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import FAMILIES, Family
from glm_accelerate.models.linear import Adapter, Linear, PackedWeight, linear_layers, projection_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection

PREFIX = "transformer.prefix_encoder.embedding.weight"  # the prefix's name in ChatGLM's checkpoints


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
    model.layers[:-layers].requires_grad_(False)  # so projections shared with a frozen layer stay frozen


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
    """The layers that `targets` names. A name that matches none is an error that lists all names."""
    every = linear_layers(model)
    if targets == "all-linear":
        return every
    family = FAMILIES[model.origin.family]
    targets = [targets] if isinstance(targets, str) else targets
    spellings = {name: _spellings(name, family) for name, _ in every}
    for target in targets:
        if not any(each.endswith(f".{target}") for names in spellings.values() for each in names):
            known = sorted({each.rpartition(".")[2] for names in spellings.values() for each in names})
            raise UserError(
                f"adapt.targets: no layer is called {target!r}", cure=f"there are {', '.join(known)}"
            )
    endings = tuple(f".{target}" for target in targets)
    return [(name, layer) for name, layer in every if any(s.endswith(endings) for s in spellings[name])]


def _spellings(name: str, family: Family) -> set[str]:
    """The names of a layer, and of the projection that it may be half of: ours and the family's."""
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
        bound = 1 / math.sqrt(layer.inputs)  # the same as kaiming_uniform(a=sqrt(5))
        A = torch.empty(settings.rank, layer.inputs).uniform_(-bound, bound, generator=generator)
        weight = next(layer.parameters())
        device = "cpu" if weight.is_meta else weight.device  # on `meta` weights are read later
        layer.adapt(A.to(device), torch.zeros(layer.outputs, settings.rank, device=device), adapter)


def merge(model: Decoder) -> None:
    """Add every adapter into its layer and drop it, in place."""
    for _, layer in adapted_layers(model):
        layer.merge()


class Prefix(nn.Module):
    """P-tuning v2: learnt keys and values before each document. As in ChatGLM's own code they carry no rotary
    positions and shift nobody else's. A row a prefix token: for each layer its keys, then its values.
    """

    def __init__(self, model: Decoder, tokens: int, share: float, generator: torch.Generator) -> None:
        super().__init__()
        sizes = model.sizes
        self.shape = (tokens, sizes.layers, 2, sizes.kv_heads, sizes.head_width)
        width = sizes.layers * 2 * sizes.kv_heads * sizes.head_width
        weight = torch.empty(tokens, width).normal_(generator=generator)
        self.weight = nn.Parameter(weight if model.embed.is_meta else weight.to(model.embed.device))
        self.share = share
        self.layers = slice(None)  # that are in this process,
        self.heads = slice(None)  # ... and key heads

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """(keys_KPD, values_KPD) of every layer that is here."""
        rows_PL2KD = dropout(self.weight, self.share, self.training).view(self.shape)
        layers = rows_PL2KD.permute(1, 2, 3, 0, 4)[self.layers, :, self.heads]
        return [(layer[0], layer[1]) for layer in layers.unbind(0)]


def add_prefix(model: Decoder, tokens: int, share: float, seed: int = 0) -> None:
    """Freeze the model and put a learnt prefix before it, in place."""
    model.requires_grad_(False)
    model.prefix = Prefix(model, tokens, share, torch.Generator().manual_seed(seed))


def kind_of(section: "AdaptSection") -> Kind | None:
    """How the config packs the frozen base, if at all."""
    return next((kind for kind in get_args(Kind) if kind == section.base), None)


def quantize(model: Decoder, kind: Kind) -> None:
    """Pack every plain linear layer inside the blocks, in place. Embedding, head, norms and biases stay as
    they are. On the device `meta` this makes empty tensors, which `load_model` fills as it reads.
    """
    for _, layer in linear_layers(model):
        if layer.packed is None:
            layer.pack(kind)


def kept_bytes(sizes: Sizes, dtype: torch.dtype, kind: Kind | None) -> int:
    """The bytes of a frozen model: linear layers inside the blocks as `kind`, the rest in `dtype`."""
    with torch.device("meta"):
        model = Decoder(sizes, Origin("", {}, "")).to(dtype)
    if kind is not None:
        quantize(model, kind)
    return sum(parameter.nbytes for parameter in model.parameters())


def count(model: nn.Module) -> int:
    """The number of a model's weights, packed ones counted as weights too."""
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    inside = {parameter for module in packed for parameter in module.parameters()}
    plain = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    return plain + sum(module.codes.shape[0] * module.inputs for module in packed)
