"""A whole model, from a recipe or from whatever a user points at."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.assemble.recipe import ModelFiles, Recipe
from glm_accelerate.assemble.tensors import put, trained
from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.made_with import made_with, require_made_with
from glm_accelerate.checkpoint.origin import begun_on, config_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.templates import detect_template
from glm_accelerate.memory.frozen import FrozenWeights
from glm_accelerate.models.adapt import adapt, merge
from glm_accelerate.models.adapter_files import base_named_by, is_adapter, load_adapter
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear, float8_products
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import load_model, part_reader, read_config
from glm_accelerate.parallel.context import share_documents
from glm_accelerate.parallel.pipeline import keep_stage
from glm_accelerate.parallel.place import SINGLE, TENSOR, Place
from glm_accelerate.parallel.shard import fill, gather_narrow, shard
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.parallel.tensor import cut_model
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import local_name


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to answer, and what goes with it."""

    model: Decoder
    base: Path  # where tokenizer files are
    template: str
    step: int | None
    on_a_run: bool = False  # the base of its adapter is another run's weights: no directory holds them


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on its device, how it lies over the ranks, and what is not as planned."""

    model: Decoder
    table: CutTable
    notes: list[str]


def assemble(recipe: Recipe, device: torch.device, place: Place = SINGLE) -> Assembled:
    """The model of a recipe, from its files."""
    return complete(_read(recipe, device), recipe, device, place)


def complete(model: Decoder, recipe: Recipe, device: torch.device, place: Place = SINGLE) -> Assembled:
    """Turn a model that has its weights into what the recipe describes.

    Adapters come before dividing, as they are divided too; what was divided without numbers is filled before
    weights move and operators are chosen, which depends on where they are.
    """
    files, notes = recipe.files, list[str]()
    model.compute, model.recompute = recipe.compute, recipe.recompute
    if recipe.adapt is None:
        model.requires_grad_(True)
    else:
        adapt(model, recipe.adapt, recipe.seed)
    if files.adapter is not None:
        load_adapter(model, files.adapter)
    if recipe.float8 and (left := float8_products(model)):
        stay = "in bfloat16: 8-bit products go along multiples of 16"
        notes.append(f"{len(left)} layers, as {left[0]}, stay {stay}")
    cuts = cut_model(model, place) if place.count(*TENSOR) > 1 else {}
    if recipe.stages:
        cuts = keep_stage(model, place, recipe.stages, device, cuts)
    table = CutTable(place=place, cuts=cuts, device=device)
    if place.axes.context > 1:
        share_documents(model, place)
    if place.axes.shard > 1:
        shard(model, list(model.layers), ["hidden"], place.mesh(device))
    if recipe.read_to == "meta":
        fill(model, part_reader(model), device, table)
    elif table.cuts or recipe.stages:
        model.to(device)
    if recipe.gather_narrow and place.axes.shard > 1:
        gather_narrow(model)
    if recipe.offload:
        FrozenWeights(model.layers, device)
        model.to(device)
    bind_operators(model, compiled=recipe.compiled)
    if recipe.copies and model.form == "native":  # of weights that would be cast again in every pass
        for part in model.modules():
            if isinstance(part, Linear) and part.plain and model.compute not in (None, part.weight.dtype):
                part.keep_copy(model.compute)
    return Assembled(model, replace(table, weights=trained(model)), notes)


def open_model(
    path: Path,
    *,
    base: Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    merged: bool = False,
) -> Opened:
    """A model from a Hugging Face directory, an adapter, one of our checkpoints, or a run (its newest)."""
    if is_adapter(path):
        opened = _open_adapter(path, base, device, dtype)
    elif (path / "config.json").is_file() or not path.is_dir():
        directory = locate(str(path))
        model = load_model(directory, dtype=dtype, device=device)
        opened = Opened(model.eval(), directory, detect_template(directory), None)
    else:
        opened = _open_checkpoint(resolve_path(path), base, device, dtype)
    if merged:
        merge(opened.model)
    return opened


def dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a model is served in, from its config.json: full fine-tuning keeps float32 masters."""
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name in ("float32", "bfloat16", "float16") else None


def _read(recipe: Recipe, device: torch.device) -> Decoder:
    """The weights that training began on: the model directory's, or what --init-from named, merged (which
    `adapt` quantises).
    """
    files, first = recipe.files, device if recipe.read_to == "device" else torch.device(recipe.read_to)
    if files.begun_on is None:
        return load_model(files.directory, dtype=recipe.dtype, device=first, quantized=recipe.quantized)
    if not files.begun_on.is_dir():
        raise UserError("the run began on this with --init-from, and it is gone", where=files.begun_on)
    return open_model(files.begun_on, dtype=recipe.dtype, device=first, merged=True).model


def _open_checkpoint(
    checkpoint: Path, base: Path | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> Opened:
    """A checkpoint's tensors on its base, which is never quantised here: that is for training."""
    reader = Reader(checkpoint)
    config, begun = config_of(checkpoint), begun_on(checkpoint.resolve().parent.parent)
    named = str(base or config.model.path)
    directory = locate(named)
    require_made_with(reader, made_with(directory, config.adapt, begun))
    served = None if dtype is not None else _served_dtype(reader, config, directory)
    files = ModelFiles(directory, begun)
    section = None if served is not None else config.adapt.model_copy(update={"base": "auto"})
    wanted = served or dtype or getattr(torch, config.model.dtype)
    model = assemble(Recipe(files, section, dtype=wanted), take_device(device or "cpu")).model
    put(model, reader, reader.directory)
    if begun is None:
        model.origin = replace(model.origin, name=local_name(named))
    on_a_run = begun is not None and not (begun / "config.json").is_file()
    facts = reader.manifest.facts
    return Opened(model.eval(), directory, facts["template"], reader.manifest.step, on_a_run)


def _served_dtype(reader: Reader, config: RunConfig, directory: Path) -> torch.dtype | None:
    """The dtype that export writes, of a fully trained model if training multiplied in fewer than 32 bits."""
    products = reader.manifest.fingerprints.get("precision", "float32")
    if config.adapt.method != "full" or products.endswith("float32"):
        return None
    return dtype_of(read_config(directory)[2])


def _open_adapter(
    path: Path, base: Path | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> Opened:
    named = str(base or base_named_by(path))
    try:
        directory = locate(named)
    except UserError as error:
        what = f"the model that the adapter was trained on cannot be opened: {error.what}"
        raise UserError(what, where=named or path, cure="--base DIRECTORY") from error
    model = load_model(directory, dtype=dtype, device=device)
    model.origin = replace(model.origin, name=local_name(named))
    load_adapter(model, path)
    return Opened(model.eval(), directory, detect_template(directory), None)
