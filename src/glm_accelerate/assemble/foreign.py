"""Checkpoints of the stock scripts, as the Trainer of transformers writes them, in our names, to go on from.

checkpoint-N/   trainer_state.json   the step
                adapter_model.safetensors with adapter_config.json, or model.safetensors (or shards of it)
                optimizer.pt         a pickle: opened in another process; scheduler.pt, rng_state.pth: never
"""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from glm_accelerate.assemble.tensors import WholeTensors
from glm_accelerate.checkpoint import format
from glm_accelerate.checkpoint.pickled import GROUPS, unpickle_apart
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapter_files import CONFIG, UNSUPPORTED, WEIGHTS, is_adapter
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import Family
from glm_accelerate.models.weights import read_config, require_readable, weight_files
from glm_accelerate.runtime.errors import UserError

STATE, OPTIMIZER = "trainer_state.json", "optimizer.pt"
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}

# The order in which stock's classes register what a layer has: an optimizer's file knows numbers, no names.
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
ORDER = {
    "glm": (*ATTENTION, *MLP, *NORMS),
    "glm4": (*ATTENTION, *MLP, *NORMS),
    "chatglm": (NORMS[0], "self_attn.query_key_value", "self_attn.o_proj", NORMS[1], *MLP),
}
KINDS = ("weight", "bias", "lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """All that a stock checkpoint gives: `optimizer` is empty where its moments could not be matched."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # `name::moment`
    notes: list[str]  # what is not as an uninterrupted stock run would have it

    @property
    def source(self) -> WholeTensors:
        """Its tensors for `restore`."""
        return WholeTensors({format.WEIGHTS: self.weights, format.OPTIMIZER: self.optimizer})


def is_foreign(directory: Path) -> bool:
    """Whether a directory is a checkpoint of the stock way."""
    return (directory / STATE).is_file()


def read_foreign(directory: Path, model_dir: Path, section: AdaptSection, scratch: Path) -> ForeignCheckpoint:
    """What training goes on from. `scratch`: a directory with room for the optimizer's state for a moment."""
    step, planned = _steps(directory)
    family, sizes, config = read_config(model_dir)
    with torch.device("meta"):
        model = Decoder(sizes, Origin(family.name, config, str(model_dir)))
    adapt(model, section)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    notes = [
        "samples come in our order from here on: the epoch that stock began is not finished as stock would"
    ]
    if planned:
        notes.append(f"stock planned {planned:,} steps: its schedule goes on only with train.steps={planned}")
    if section.method == "lora":
        weights = _adapter(directory, shapes, family, section, notes)
    elif section.method == "full":
        weights = _whole_model(directory, shapes, family)
    else:
        raise UserError(
            f"adapt.method {section.method} cannot go on from a stock checkpoint",
            where=directory,
            cure="adapt.method=lora or full; or begin a new run",
        )
    optimizer = _moments(
        directory, sorted(shapes, key=lambda n: _position(n, family)), shapes, scratch, notes
    )
    return ForeignCheckpoint(step, weights, optimizer, notes)


def _steps(directory: Path) -> tuple[int, int | None]:
    """The step of a checkpoint, and how many were planned."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        step, planned = state["global_step"], state.get("max_steps")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"does not say its step: {error}", where=directory / STATE) from error
    if type(step) is not int or step < 0:
        raise UserError(f"global_step is {step!r}", where=directory / STATE)
    return step, planned if type(planned) is int and planned > 0 else None


def _adapter(
    directory: Path, shapes: Mapping[str, torch.Size], family: Family, section: AdaptSection, notes: list[str]
) -> dict[str, Tensor]:
    """LoRA matrices, where stock trained the same ones as this config."""
    if not is_adapter(directory):
        raise UserError("holds no adapter, the config trains one", where=directory, cure="adapt.method=full")
    for name in (CONFIG, WEIGHTS):
        require_readable(directory / name)
    try:
        theirs: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"not a whole adapter: {error}", where=directory) from error
    odd = [key for key in UNSUPPORTED if theirs.get(key)]
    if theirs.get("peft_type") != "LORA" or odd:
        what = f"with {odd[0]}" if odd else f"of type {theirs.get('peft_type')}"
        raise UserError(f"adapters {what} cannot be gone on from", where=directory / CONFIG)
    rank, alpha = theirs["r"], float(theirs["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if theirs.get("use_rslora") else rank)
    names: dict[str, str] = {}
    for name in shapes:
        layer, _, matrix = name.rpartition(".")
        names[f"base_model.model.{family.module(layer)}.{matrix}.weight"] = name
    if names.keys() != tensors.keys() or not math.isclose(scale, section.alpha / section.rank):
        layers = sorted({name.split(".")[-3] for name in tensors})
        cure = f"adapt.rank={rank} adapt.alpha={scale * rank:.17g} adapt.targets='[{', '.join(layers)}]'"
        raise UserError("stock trained another adapter than this config", where=directory / CONFIG, cure=cure)
    if (dropout := theirs.get("lora_dropout", 0.0)) != section.dropout:
        notes.append(f"dropout was {dropout:g} and is {section.dropout:g} (adapt.dropout)")
    return _fitting({names[key]: tensor for key, tensor in tensors.items()}, shapes, directory / WEIGHTS)


def _whole_model(directory: Path, shapes: Mapping[str, torch.Size], family: Family) -> dict[str, Tensor]:
    """Every weight, from one file or from shards."""
    if is_adapter(directory):
        raise UserError("holds an adapter", where=directory, cure="adapt.method=lora")
    names = {family.theirs(name): name for name in shapes}
    weights: dict[str, Tensor] = {}
    for file in weight_files(directory):
        require_readable(file)
        try:
            with safe_open(str(file), framework="pt") as opened:
                for theirs in opened.keys():  # noqa: SIM118 (not a dict)
                    if theirs in names:
                        weights[names[theirs]] = opened.get_tensor(theirs)
        except (SafetensorError, OSError) as error:
            raise UserError(f"not a whole safetensors file: {error}", where=file) from error
    return _fitting(weights, shapes, directory)


def _fitting(weights: dict[str, Tensor], shapes: Mapping[str, torch.Size], where: Path) -> dict[str, Tensor]:
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            has = list(weights[name].shape) if name in weights else "missing"
            cure = "the model and the adapt section that stock trained with are needed"
            raise UserError(f"{name} is {has}, this config wants {list(shape)}", where=where, cure=cure)
    return weights


def _moments(
    directory: Path, names: list[str], shapes: Mapping[str, torch.Size], scratch: Path, notes: list[str]
) -> dict[str, Tensor]:
    """AdamW's, if their number and shapes are those of our parameters in stock's order; else none."""
    pickled = directory / OPTIMIZER
    if not pickled.is_file():
        notes.append(f"no {OPTIMIZER}: the weights alone go on, the optimizer begins anew")
        return {}
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".stock.") as folder:
        target = Path(folder) / "optimizer.safetensors"
        unpickle_apart("optimizer", pickled, target, f"remove {OPTIMIZER} to go on with the weights alone")
        with safe_open(str(target), framework="pt") as opened:
            groups: list[list[int]] = json.loads(opened.metadata()[GROUPS])
        theirs = load_file(target)
    for order in _orders(names, groups):
        ours = _renamed(theirs, order, shapes)
        if ours is not None:
            return ours
    notes.append(
        f"{OPTIMIZER} does not match these parameters: the weights alone go on, the optimizer begins anew"
    )
    return {}


def _orders(names: list[str], groups: list[list[int]]) -> Iterator[dict[int, str]]:
    """The names of the optimizer's numbers: decayed ones first. Older Trainers decayed norms as well."""
    bare = {name for name in names if name.endswith(".bias")}
    norms = {name for name in names if "norm" in name}
    for spared in (bare | norms, bare):
        wanted = [[n for n in names if n not in spared], [n for n in names if n in spared]]
        if [len(group) for group in wanted if group] == [len(group) for group in groups if group]:
            yield dict(zip(chain(*groups), chain(*wanted), strict=True))


def _renamed(
    theirs: Mapping[str, Tensor], order: Mapping[int, str], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor] | None:
    ours: dict[str, Tensor] = {}
    for key, value in theirs.items():
        number, _, moment = key.partition("::")
        name = order.get(int(number))
        shape = torch.Size() if moment == "step" else None if name is None else shapes[name]
        if moment not in MOMENTS or name is None or value.shape != shape:
            return None
        ours[f"{name}::{moment}"] = value.float()
    return ours if len(ours) == len(MOMENTS) * len(order) else None


def _position(name: str, family: Family) -> tuple[int, int, int]:
    """Where stock's model registers one of our parameters."""
    if not name.startswith("layers."):
        return ({"embed": -1, "norm.weight": 1 << 30, "head.weight": 1 << 31}[name], 0, 0)
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return int(layer), ORDER[family.name].index(module), KINDS.index(kind)
