"""Writing a whole model as a directory that transformers, and so vLLM and SGLang, opens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.families import FAMILIES
from glm_accelerate.models.sizes import Sizes, compressed_config
from glm_accelerate.models.weights import INDEX
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


def state_for(model: Decoder, layout: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config.json as they go to disk. `hf`: what transformers opens; `original`: as they came;
    `structured`: shared and factored matrices as they are, for `load_model` alone.
    """
    family = FAMILIES[model.origin.family]
    named = dict(model.named_parameters())
    foreign = [name for name in named if "lora_" in name or name.startswith("prefix.")]
    if foreign:
        raise UserError("the model has unmerged adapters", cure="merge them, or save the adapter alone")
    if any(".packed." in name for name in named):
        raise UserError("the model is quantised", cure="load it as its files have it")
    if not model.sizes.plain:
        if layout != "structured":
            raise UserError("the model shares or factors matrices", cure='expand it, or layout="structured"')
        state = {name: tensor.detach() for name, tensor in named.items()}
        return state, compressed_config(model.sizes, model.origin.config)
    if layout == "original" or family.name != "chatglm":
        return {family.theirs(name): tensor.detach() for name, tensor in named.items()}, dict(
            model.origin.config
        )
    state = {}
    for name, tensor in named.items():
        for ours, part in split_fused(name, tensor.detach(), model.sizes):
            state[FAMILIES["glm"].theirs(ours)] = part
    return state, glm_config(model.sizes, model.origin.config)


def split_fused(name: str, tensor: Tensor, sizes: Sizes) -> list[tuple[str, Tensor]]:
    """ChatGLM's one matrix of queries, keys and values, as the three that `glm` has."""
    if "self_attn.query_key_value" not in name:
        return [(name, tensor)]
    query, key = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split((query, key, key)), strict=True)
    return [(name.replace("query_key_value", part), rows.contiguous()) for part, rows in parts]


def glm_config(sizes: Sizes, source: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a ChatGLM model as `glm`."""
    stops, pad = source.get("eos_token_id"), source.get("pad_token_id")
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.mlp_width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rope_theta,
        "partial_rotary_factor": sizes.rope_width / sizes.head_width,
        "attention_bias": sizes.qkv_bias,
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": sizes.tied,
        "hidden_act": "silu",
        "eos_token_id": stops if stops is not None else 2,
        "pad_token_id": pad if pad is not None else 0,
    }
