"""Adapters as small directories: LoRA in PEFT's own format, a prefix under ChatGLM's name for it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm_accelerate.models.adapt import PREFIX, LoraSettings, Prefix, adapted_layers, add_lora, add_prefix
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.families import FAMILIES
from glm_accelerate.models.weights import require_readable
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "lora_bias",
)


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter."""
    return (path / CONFIG).is_file()


def require_same(directory: Path, section: "AdaptSection") -> None:
    """Refuses an adapter that differs from the config: from the first restart on, the config alone gives the
    scale of its products.
    """
    config, tensors = _read(directory)
    if config.get("peft_type") == "CHATGLM_PREFIX":
        tokens = config.get("prefix_tokens")
        same = section.method == "prefix" and section.prefix_tokens == tokens
        has, cure = f"a prefix of {tokens} tokens", f"adapt.method=prefix adapt.prefix_tokens={tokens}"
    else:
        settings = _lora_settings(config, tensors, directory)
        rank, scale = settings.rank, settings.scale
        alike = section.rank == rank and math.isclose(section.alpha / section.rank, scale)
        same = section.method == "lora" and alike
        has = f"LoRA of rank {rank}, scaled by {scale:.6g}"
        cure = f"adapt.method=lora adapt.rank={rank} adapt.alpha={scale * rank:.17g}"
    if not same:
        ours = f"rank {section.rank}, scaled by {section.alpha / section.rank:.6g}"
        wanted = f"LoRA of {ours}" if section.method == "lora" else f"adapt.method={section.method}"
        raise UserError(f"the adapter is {has}; the config says {wanted}", where=directory, cure=cure)


def base_named_by(directory: Path) -> str:
    """The name of the model that an adapter was trained on; empty if it has none."""
    return str(_read(directory)[0].get("base_model_name_or_path") or "")


def save_adapter(model: Decoder, path: str | Path) -> None:
    """Write the model's LoRA adapter or prefix."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(model.prefix, Prefix):
        tensors = {PREFIX: model.prefix.weight}
        config: dict[str, Any] = {
            "peft_type": "CHATGLM_PREFIX",
            "prefix_tokens": model.prefix.shape[0],
            "dropout": model.prefix.share,
        }
    else:
        tensors, config = _lora_state(model)
    config["base_model_name_or_path"] = model.origin.name or model.origin.path
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def _lora_state(model: Decoder) -> tuple[dict[str, Tensor], dict[str, Any]]:
    layers = adapted_layers(model)
    if not layers:
        raise UserError("the model has no adapter to save", cure="save the whole model")
    family = FAMILIES[model.origin.family]
    tensors: dict[str, Tensor] = {}
    for name, layer in layers:
        theirs = f"base_model.model.{family.module(name)}"
        tensors[f"{theirs}.lora_A.weight"] = layer.lora_A
        tensors[f"{theirs}.lora_B.weight"] = layer.lora_B
    first = layers[0][1]
    rank, adapter = first.lora_A.shape[0], first.adapter
    assert adapter is not None
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted({family.module(name).rsplit(".")[-1] for name, _ in layers}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def load_adapter(model: Decoder, path: str | Path) -> None:
    """Read an adapter into the model, adding it first if the model has none."""
    directory = Path(path)
    config, tensors = _read(directory)
    if config.get("peft_type") == "CHATGLM_PREFIX":
        _load_prefix(model, config, tensors, directory)
        return
    settings = _lora_settings(config, tensors, directory)
    if not adapted_layers(model):
        add_lora(model, settings)
    family = FAMILIES[model.origin.family]
    for name, layer in adapted_layers(model):
        theirs = f"base_model.model.{family.module(name)}"
        for parameter, key in ((layer.lora_A, "lora_A"), (layer.lora_B, "lora_B")):
            tensor = tensors.pop(f"{theirs}.{key}.weight", None)
            if tensor is None or tensor.shape != parameter.shape:
                has = "missing" if tensor is None else f"{list(tensor.shape)}, wanted {list(parameter.shape)}"
                raise UserError(
                    f"{theirs}.{key} is {has}", where=directory, cure="same rank and targets needed"
                )
            parameter.data.copy_(tensor)
        assert layer.adapter is not None
        if not math.isclose(layer.adapter.scale, settings.scale):  # else the model's own, to the last bit
            layer.adapter = replace(layer.adapter, scale=settings.scale)
    if tensors:
        raise UserError(f"{len(tensors)} tensors fit nowhere, as {next(iter(tensors))}", where=directory)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG, WEIGHTS):
        require_readable(directory / name)
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} is no object")
        return config, load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"not a whole adapter: {error}", where=directory) from error


def _lora_settings(config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> LoraSettings:
    if config.get("peft_type") != "LORA":
        raise UserError(f"peft_type {config.get('peft_type')!r} cannot be read", where=directory)
    for key in UNSUPPORTED:
        if config.get(key):
            raise UserError(f"adapters with {key} cannot be read", where=directory / CONFIG)
    if config.get("bias", "none") != "none":
        raise UserError("adapters that train biases cannot be read", where=directory / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(f"r {rank!r}, lora_alpha {alpha!r}: numbers are wanted", where=directory / CONFIG)
    return LoraSettings(
        rank=rank,
        alpha=float(alpha),
        dropout=float(config.get("lora_dropout", 0.0)),
        targets=[  # the layers in the file, which the config may abbreviate
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            for name in tensors
            if name.endswith(".lora_A.weight")
        ],
        root_scale=bool(config.get("use_rslora", False)),
    )


def _load_prefix(model: Decoder, config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> None:
    if PREFIX not in tensors or not isinstance(config.get("prefix_tokens"), int):
        raise UserError("not a whole prefix", where=directory)
    if model.prefix is None:
        add_prefix(model, config["prefix_tokens"], float(config.get("dropout", 0.0)))
    assert isinstance(model.prefix, Prefix)
    if tensors[PREFIX].shape != model.prefix.weight.shape:
        raise UserError("the prefix was made for a model of other sizes", where=directory)
    with torch.no_grad():
        model.prefix.weight.copy_(tensors[PREFIX])
