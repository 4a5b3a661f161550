"""A model from its files: weights are read straight onto the device, one tensor at a time. safetensors only;
nothing is unpickled.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.adapt import quantize
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import FAMILIES, Family, family_of
from glm_accelerate.models.linear import Linear, PackedWeight
from glm_accelerate.models.locate import locate
from glm_accelerate.models.sizes import Sizes, plain_config
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import local_name

INDEX = "model.safetensors.index.json"
_AGAIN = "correct it, or download it again"
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # numbers that need no scale


def read_config(directory: Path) -> tuple[Family, Sizes, dict[str, Any]]:
    """A model directory's family, sizes and config.json; of a compressed one that of the plain model."""
    path = directory / "config.json"
    config, compression = plain_config(_read_config(path), path)
    family = family_of(config, path)
    try:
        return family, compression.applied_to(family.read(config)), config
    except KeyError as error:
        raise UserError(f"key {error} is missing", where=path, cure=_AGAIN) from error
    except ValueError as error:
        raise UserError(str(error), where=path, cure=_AGAIN) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read it: {error}", where=path) from error
    if not isinstance(config, dict):
        raise UserError("not a model's config: expected an object", where=path)
    return config


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    quantized: Kind | None = None,
) -> Decoder:
    """A model with the weights of a Hugging Face directory, in `dtype` (default: as in the files).

    `quantized`: linear layers are packed one by one as they are read.
    `device`, if it is a GPU, is the process's current one from here on.
    On the device `meta` it is checked against its files and has no weights; `part_reader` reads them later.
    """
    place = take_device(device or "cpu")
    directory = locate(str(path))
    family, sizes, config = read_config(directory)
    with torch.device("meta"):
        model = Decoder(sizes, Origin(family.name, config, str(directory), local_name(str(path))))
    name_of = _naming(model)
    theirs = {name_of(name): name for name, _ in model.named_parameters()}
    wanted = dict(model.named_parameters())
    if quantized is not None:
        quantize(model, quantized)
    strange: list[str] = []
    for file, name, read in _tensors(directory):
        ours = theirs.pop(name, None)
        if ours is None:
            if name not in family.ignored and not (sizes.tied and name == name_of("head.weight")):
                strange.append(name)
            continue
        tensor = read()
        if tensor.dtype not in _PLAIN:
            kind = str(tensor.dtype).removeprefix("torch.")
            cure = "a quantised model has to be written as bfloat16 first; `adapt.base` packs it here"
            raise UserError(
                f"{name} is {kind}: float32, bfloat16 or float16 is expected", where=file, cure=cure
            )
        if tensor.shape != wanted[ours].shape:
            raise UserError(
                f"{name} is {list(tensor.shape)}, config.json says {list(wanted[ours].shape)}", where=file
            )
        _place(model, ours, tensor, dtype, place)
    if theirs or strange:
        raise UserError(
            _mismatch(list(theirs), strange), where=directory, cure="config.json and weights disagree"
        )
    if sizes.tied:
        model.head.weight = model.embed
    bind_operators(model)
    return model


def part_reader(model: Decoder) -> Callable[[str, Sequence[int], Sequence[int]], Tensor]:
    """Reads part of one of the model's tensors from its files, by offset and shape, and nothing else."""
    name_of, files = _naming(model), {name: file for file, name, _ in _tensors(Path(model.origin.path))}

    @lru_cache(maxsize=1)  # the parts of a packed weight are read one after the other
    def packed(owner: str, kind: Kind, inputs: int, first: int, rows: int) -> PackedWeight:
        layer = owner.removesuffix(".packed")
        return PackedWeight(kind, read(f"{layer}.weight", (first, 0), (rows, inputs)))

    def read(ours: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        owner, _, leaf = ours.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, PackedWeight):
            whole = packed(owner, module.kind, module.row, offset[0], shape[0]).get_parameter(leaf)
            return whole[:, offset[1] : offset[1] + shape[1]]
        name = name_of(ours)
        region = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        with safe_open(str(files[name]), framework="pt") as opened:
            return opened.get_slice(name)[region]

    return read


def _naming(model: Decoder) -> Callable[[str], str]:
    """From our names to those in the model's files: its family's, or, of a compressed model, the same."""
    return FAMILIES[model.origin.family].theirs if model.sizes.plain else lambda ours: ours


def _tensors(directory: Path) -> Iterator[tuple[Path, str, Any]]:
    """Every tensor in the directory's safetensors: its file, its name, and a function that reads it."""
    for file in weight_files(directory):
        require_readable(file)
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield file, name, lambda opened=opened, name=name: opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"not a whole safetensors file: {error}", where=file, cure="download or copy it again"
            ) from error


def require_readable(file: Path) -> None:
    """Raises the system's own error: safetensors reports every file that it may not open as missing."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=file) from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, never outside its directory."""
    index = directory / INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        if single.is_file():
            return [single]
        if any(directory.glob("pytorch_model*.bin")):
            raise UserError(
                "only pickled weights here, which are never opened",
                where=directory,
                cure=f"glm-accelerate convert {directory} OUT",
            )
        raise UserError("no model.safetensors and no index of shards", where=directory)
    return shards_of(index)


def shards_of(index: Path) -> list[Path]:
    """The files that an index names, never outside its directory."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"not an index of shards: {error}", where=index) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"names a file outside its directory: {name!r}", where=index)
        if not (index.parent / name).is_file():
            raise UserError(f"shard {name} is missing", where=index.parent, cure="download or copy it again")
    return [index.parent / name for name in names]


def _mismatch(missing: list[str], strange: list[str]) -> str:
    def few(names: list[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(sorted(names)[:3]) + more

    parts = [f"{len(missing)} tensors missing: {few(missing)}"] if missing else []
    parts += [f"{len(strange)} unexpected: {few(strange)}"] if strange else []
    return "; ".join(parts)


def _place(
    model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str
) -> None:
    """Replace the meta parameter `name` by a tensor."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Linear) and module.packed is not None and leaf == "weight":
        module.packed.fill(tensor.to(device))  # from the file's numbers, not from those rounded to `dtype`
        return
    placed = torch.empty_like(tensor, dtype=dtype, device=device).copy_(tensor)
    setattr(module, leaf, nn.Parameter(placed, requires_grad=False))
