"""A whole model from whatever a user points at."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.format import WEIGHTS
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.templates import detect_template
from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.files import is_adapter, load_adapter
from glm_accelerate.models.adapt.lora import merge
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.errors import UserError

INIT_FROM = "init_from"  # in a run's directory: whose weights it began on, where that is not its model


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to answer, and what goes with it."""

    model: Decoder
    base: Path  # where tokenizer files are
    template: str
    step: int | None


def load_weights(model: Decoder, weights: dict[str, Tensor], where: object) -> None:
    """Put trained tensors into a model that has a place for each of them."""
    places = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if places.keys() != weights.keys():
        odd = sorted(places.keys() ^ weights.keys())
        raise UserError(f"trains other tensors than this config, as {odd[0]}", where=where)
    for name, tensor in weights.items():
        if tensor.shape != places[name].shape:
            wanted = list(places[name].shape)
            raise UserError(f"{name} is {list(tensor.shape)}, this config wants {wanted}", where=where)
        places[name].data.copy_(tensor)


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


def load_base(
    run: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    quantized: Kind | None = None,
) -> Decoder:
    """The weights that a run began on: its model directory, or what --init-from named, merged (which
    `adapt` quantises).
    """
    said = run / INIT_FROM
    if not said.is_file():
        return load_model(directory, dtype=dtype, device=device, quantized=quantized)
    source = Path(said.read_text(encoding="utf-8").strip())
    if not source.is_dir():
        raise UserError("the run began on this with --init-from, and it is gone", where=source)
    return open_model(source, dtype=dtype, device=device, merged=True).model


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
    config = _config_of(checkpoint)
    directory = base or locate(config.model.path)
    wanted = dtype or getattr(torch, config.model.dtype)
    model = load_base(checkpoint.resolve().parent.parent, directory, dtype=wanted, device=device)
    shapes = reader.shapes(WEIGHTS)
    adapt(model, config.adapt.model_copy(update={"base": "auto"}), shapes=shapes)  # on the base as in files
    load_weights(model, reader.group(WEIGHTS), checkpoint)
    return Opened(model.eval(), directory, reader.manifest.facts["template"], reader.manifest.step)


def _open_adapter(
    path: Path, base: Path | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> Opened:
    if base is None:
        raise UserError(
            "an adapter needs the model that it was trained on", where=path, cure="--base DIRECTORY"
        )
    directory = locate(str(base))
    model = load_model(directory, dtype=dtype, device=device)
    load_adapter(model, path)
    return Opened(model.eval(), directory, detect_template(directory), None)


def _config_of(checkpoint: Path) -> RunConfig:
    """The config of the run that a checkpoint lies in."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        raise UserError("the run's config.yaml is not where the checkpoint came from", where=path)
    return load_config(path)
