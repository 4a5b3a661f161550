"""A whole model from whatever a user points at."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.format import WEIGHTS
from glm_accelerate.checkpoint.made_with import made_with, require_made_with
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.paths import local_name
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.templates import detect_template
from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.files import base_named_by, is_adapter, load_adapter
from glm_accelerate.models.adapt.lora import merge
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import load_model, read_config
from glm_accelerate.runtime.errors import UserError

INIT_FROM = "init_from"  # in a run's directory: whose weights it began on, where that is not its model


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to answer, and what goes with it."""

    model: Decoder
    base: Path  # where tokenizer files are
    template: str
    step: int | None
    on_a_run: bool = False  # the base of its adapter is another run's weights: no directory holds them


def load_weights(model: Decoder, reader: Reader) -> None:
    """Put trained tensors into a model that has a place for each of them."""
    shapes, where = reader.shapes(WEIGHTS), reader.directory
    places = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if places.keys() != shapes.keys():
        odd = sorted(places.keys() ^ shapes.keys())
        raise UserError(f"trains other tensors than this config, as {odd[0]}", where=where)
    for name, shape in shapes.items():
        if shape != tuple(places[name].shape):
            wanted = list(places[name].shape)
            raise UserError(f"{name} is {list(shape)}, this config wants {wanted}", where=where)
        places[name].data.copy_(reader.tensor(WEIGHTS, name))


def open_model(
    path: Path,
    *,
    base: Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    merged: bool = False,
) -> Opened:
    """A model from a Hugging Face directory, an adapter, one of our checkpoints, or a run (its newest)."""
    opened = _open(path, base, device, dtype)
    if merged:
        merge(opened.model)
    return opened


def begun_on(run: Path) -> Path | None:
    """Whose weights a run began on, if not on its config's model."""
    said = run / INIT_FROM
    return run / said.read_text(encoding="utf-8").strip() if said.is_file() else None


def load_base(
    begun: Path | None,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    quantized: Kind | None = None,
) -> Decoder:
    """The weights that a run began on: its model directory, or what --init-from named, merged (which
    `adapt` quantises).
    """
    if begun is None:
        return load_model(directory, dtype=dtype, device=device, quantized=quantized)
    if not begun.is_dir():
        raise UserError("the run began on this with --init-from, and it is gone", where=begun)
    return open_model(begun, dtype=dtype, device=device, merged=True).model


def _open(
    path: Path, base: Path | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> Opened:
    if is_adapter(path):
        return _open_adapter(path, base, device, dtype)
    if (path / "config.json").is_file() or not path.is_dir():
        directory = locate(str(path))
        model = load_model(directory, dtype=dtype, device=device)
        return Opened(model.eval(), directory, detect_template(directory), None)
    checkpoint = resolve_path(path)
    reader = Reader(checkpoint)
    config, begun = config_of(checkpoint), begun_on(checkpoint.resolve().parent.parent)
    named = str(base or config.model.path)
    directory = locate(named)
    require_made_with(reader, made_with(directory, config.adapt, begun))
    served = None if dtype is not None else _served_dtype(reader, config, directory)
    wanted = served or dtype or getattr(torch, config.model.dtype)
    model = load_base(begun, directory, dtype=wanted, device=device)
    if served is not None:
        model.requires_grad_(True)
    else:  # on the base as in files
        shapes = reader.shapes(WEIGHTS)
        adapt(model, config.adapt.model_copy(update={"base": "auto"}), shapes=shapes)
    load_weights(model, reader)
    if begun is None:
        model.origin = replace(model.origin, name=local_name(named))
    on_a_run = begun is not None and not (begun / "config.json").is_file()
    facts = reader.manifest.facts
    return Opened(model.eval(), directory, facts["template"], reader.manifest.step, on_a_run)


def dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """Full fine-tuning keeps float32 master weights; what is served is as wide as what it began as."""
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name in ("float32", "bfloat16", "float16") else None


def _served_dtype(reader: Reader, config: RunConfig, directory: Path) -> torch.dtype | None:
    """Of weights that are all trained: what export writes, if training multiplied in fewer bits than 32."""
    products = reader.manifest.fingerprints.get("precision", "float32")
    if config.adapt.method != "full" or config.adapt.restructures or products.endswith("float32"):
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


def config_of(checkpoint: Path) -> RunConfig:
    """The config of the run that a checkpoint lies in."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        raise UserError("the run's config.yaml is not where the checkpoint came from", where=path)
    return load_config(path)
