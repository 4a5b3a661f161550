"""Old pickled weights (`pytorch_model*.bin` of ChatGLM2 and ChatGLM3) to safetensors, each shard opened in a
process of its own: so one is in memory at a time, and nothing but a file comes back.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from glm_accelerate.checkpoint.pickled import unpickle_apart
from glm_accelerate.export.directory import TOKENIZER_FILES, copy_files, new_directory
from glm_accelerate.models.weights import INDEX, read_config, shards_of
from glm_accelerate.runtime.errors import UserError

OLD_INDEX = "pytorch_model.bin.index.json"
CURE = "get the model's weights from its publisher again"
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
            unpickle_apart("weights", shard, directory / name, CURE)
            with safe_open(str(directory / name), framework="pt") as opened:
                tensors = list(opened.keys())
            if twice := sorted(where.keys() & set(tensors)):
                raise UserError(f"{twice[0]} is in two shards", where=shard)
            where |= dict.fromkeys(tensors, name)
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
    single = sorted(path for path in source.glob("pytorch_model*.bin") if path.is_file())
    shards = shards_of(index) if index.is_file() else single
    if not shards:
        raise UserError("no pytorch_model*.bin to convert", where=source)
    return shards


def _tensor_bytes(path: Path) -> int:
    """The size of a safetensors file without its header, which begins with its own length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
