"""Old pickled weights (`pytorch_model*.bin` of ChatGLM2 and ChatGLM3) to safetensors. Only here is anything
unpickled: each shard in a process of its own, by torch's reader that knows nothing but tensors, and what it
refuses is refused. So one shard is in memory at a time, and nothing but a file comes back.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.export.directory import TOKENIZER_FILES, copy_files, new_directory
from glm_accelerate.models.weights import INDEX, read_config
from glm_accelerate.runtime.errors import UserError

OLD_INDEX = "pytorch_model.bin.index.json"
REFUSED = 2  # the child's exit code when the file is at fault
CONFIGS = ("config.json", "generation_config.json", *TOKENIZER_FILES)

Watch = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    path: Path
    tensors: int
    bytes: int


def convert(source: Path, out: Path, watch: Watch | None = None) -> Converted:
    """Writes `out`, a whole model directory. Nothing of it is there unless all of it is."""
    read_config(source)
    shards = _shards(source)
    total, done = sum(shard.stat().st_size for shard in shards), 0
    where: dict[str, str] = {}
    with new_directory(out) as directory:
        for number, shard in enumerate(shards, start=1):
            name = (
                f"model-{number:05}-of-{len(shards):05}.safetensors"
                if len(shards) > 1
                else "model.safetensors"
            )
            _convert_apart(shard, directory / name)
            for tensor in _names(directory / name):
                if tensor in where:
                    raise UserError(f"{tensor} is in two shards", where=shard)
                where[tensor] = name
            done += shard.stat().st_size
            if watch is not None:
                watch(done, total)
        written = sum(_tensor_bytes(path) for path in directory.iterdir())
        if len(shards) > 1:
            index = {"metadata": {"total_size": written}, "weight_map": where}
            (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        copy_files(source, directory, [*CONFIGS, *(path.name for path in source.glob("*.py"))])
    return Converted(out, len(where), written)


def _shards(source: Path) -> list[Path]:
    """The pickled files of a model, never outside its directory."""
    if any(source.glob("*.safetensors")):
        raise UserError("has safetensors already", where=source, cure="use the directory as it is")
    index = source / OLD_INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"not an index of shards: {error}", where=index) from error
    else:
        names = sorted(path.name for path in source.glob("pytorch_model*.bin"))
    if not names:
        raise UserError("no pytorch_model*.bin to convert", where=source)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"names a file outside its directory: {name!r}", where=index)
        if not (source / name).is_file():
            raise UserError(f"shard {name} is missing", where=source, cure="download or copy it again")
    return [source / name for name in names]


def _convert_apart(shard: Path, target: Path) -> None:
    """In a fresh interpreter, which doesn't look for modules in the current directory (-P): it may be the
    model's, with files of its own.
    """
    words = [sys.executable, "-P", "-m", "glm_accelerate.export.convert", str(shard.resolve()), str(target)]
    child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip().splitlines() or [f"its reader ended with {child.returncode}"]
        raise UserError(said[-1], where=shard, cure="get the model's weights from its publisher again")


def _names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as opened:
        return list(opened.keys())


def _tensor_bytes(path: Path) -> int:
    """A safetensors file without its header, whose length stands first."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def convert_shard(shard: Path, target: Path) -> None:
    """What the child does."""
    if not is_zipfile(shard):
        raise UserError("refused: not a whole file as torch writes them since version 1.6")
    try:
        state: Any = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise UserError(f"refused: {_reason(str(error))}") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0].partition(". ")[0]
        raise UserError(f"not a whole file of weights: {first}") from error
    if not isinstance(state, dict):
        raise UserError(f"refused: holds {type(state).__name__}, not a table of tensors")
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"refused: {name!r} is {type(tensor).__name__}, not a tensor")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UserError(f"refused: {name} claims to be larger than what is stored of it")
        shared = tensor.untyped_storage().data_ptr() in storages  # a format without aliases needs a copy
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    save_file(tensors, target, metadata={"format": "pt"})


def _reason(message: str) -> str:
    """What torch's reader met, without its advice to trust the file."""
    foreign = re.search(r"GLOBAL (\S+)", message)
    return f"it asks for {foreign[1]}, which is no tensor" if foreign else "it holds more than tensors"


def main(words: Sequence[str]) -> int:
    """The child's: one line on stderr says what is wrong."""
    shard, target = words
    try:
        convert_shard(Path(shard), Path(target))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
