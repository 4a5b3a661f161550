"""Writing a whole model as a directory that transformers opens."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import INDEX, state_for
from glm_accelerate.runtime.errors import UserError

SHARD_BYTES = 5 * 10**9


def save_model(
    model: Decoder, path: str | Path, *, layout: str = "hf", dtype: torch.dtype | None = None
) -> None:
    """Write weights and config.json in a `layout` of `state_for`. Refuses unmerged adapters and directories
    that hold a model.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors")):
        raise UserError("the directory holds weights already", where=directory, cure="name a new one")
    state, config = state_for(model, layout)
    kept = dtype or next(iter(state.values())).dtype
    config.pop("dtype", None)
    config["torch_dtype"] = str(kept).removeprefix("torch.")  # the name that every version reads
    shards = _shards(state, kept)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    where: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        tensors = {key: state[key].to("cpu", kept).contiguous() for key in shard}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(tensor.numel() * kept.itemsize for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _shards(state: dict[str, Tensor], dtype: torch.dtype) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * dtype.itemsize
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
