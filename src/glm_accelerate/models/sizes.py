"""The numbers that define a dense GLM, whatever spelling its config.json used, and the config.json of a
compressed model (`export/compress.py`), which no other program opens by mistake:

{"model_type": "glm-accelerate", "structure": {"share_qk": 2, "ranks": {...}}, "model": the plain one's}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from glm_accelerate.data.types import DOCUMENT_ALIGNMENT
from glm_accelerate.runtime.errors import UserError

MODEL_TYPE = "glm-accelerate"


@dataclass(frozen=True, slots=True)
class Sizes:
    """L layers of width H; N query heads and K key/value heads of width D; F is the gated MLP's width."""

    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    norm_epsilon: float
    rope_theta: float
    rope_width: int  # how many of a head's dimensions are rotated
    qkv_bias: bool
    max_positions: int
    fused_qkv: bool = False  # one matrix for queries, keys and values (ChatGLM's checkpoints)
    sandwich: bool = False  # norms after each branch too (GLM-4-0414)
    tied: bool = False  # the head is the embedding

    spread: int = 1  # processes that share every product; between products each has a part of the tokens
    shared_qk: int = 1  # so many neighbouring layers have one query and one key projection between them
    # Of projections that are two thin matrices, by name (`layers.0.mlp.down_proj`): what `compress` writes.
    ranks: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)

    def part(self, ranks: int) -> "Sizes":
        """Of one of so many ranks that share every product: some heads, part of each MLP, some words.
        ValueError if they cannot.
        """
        if self.heads % ranks or self.mlp_width % ranks:
            raise ValueError(f"{self.heads} heads and MLPs of {self.mlp_width} are not {ranks} equal parts")
        if self.kv_heads % ranks and (ranks % self.kv_heads or self.fused_qkv):
            raise ValueError(f"{self.kv_heads} key heads are not divided among {ranks} ranks")
        if not self.plain:
            raise ValueError("the model shares or factors matrices")
        spread = ranks if self.vocabulary % ranks == DOCUMENT_ALIGNMENT % ranks == 0 else 1
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            mlp_width=self.mlp_width // ranks,
            vocabulary=self.vocabulary // (1 if self.vocabulary % ranks else ranks),
            spread=spread,
        )

    @property
    def plain(self) -> bool:
        """A GLM as it was published: nothing is shared or factored."""
        return self.shared_qk == 1 and not self.ranks


@dataclass(frozen=True, slots=True)
class Compression:
    """How `compress` changed a plain model."""

    shared_qk: int = 1
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])

    def applied_to(self, plain: Sizes) -> Sizes:
        """One matrix of queries, keys and values is split where queries and keys are shared."""
        fused = plain.fused_qkv and self.shared_qk == 1
        return replace(plain, shared_qk=self.shared_qk, ranks=self.ranks, fused_qkv=fused)


def compressed_config(sizes: Sizes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a compressed model; `config`: the plain one's."""
    structure = {"share_qk": sizes.shared_qk, "ranks": dict(sizes.ranks)}
    return {"model_type": MODEL_TYPE, "structure": structure, "model": dict(config)}


def plain_config(config: dict[str, Any], where: object) -> tuple[dict[str, Any], Compression]:
    """The plain model's config.json, and how it was compressed, if it was."""
    if config.get("model_type") != MODEL_TYPE:
        return config, Compression()
    inside, structure = config.get("model"), config.get("structure")
    if isinstance(inside, dict) and isinstance(structure, dict):
        share, ranks = structure.get("share_qk"), structure.get("ranks")
        if _positive(share) and isinstance(ranks, dict) and all(map(_positive, ranks.values())):
            return inside, Compression(share, ranks)
    raise UserError("does not say how the model is compressed", where=where, cure="compress it again")


def structure_in_words(sizes: Sizes) -> str:
    """Which matrices are shared and factored, for people."""
    share, ranks = sizes.shared_qk, sizes.ranks.values()
    parts = [f"each {share} layers share queries and keys"] if share > 1 else []
    parts += [f"{len(ranks)} matrices factored at ranks {min(ranks)} to {max(ranks)}"] if ranks else []
    return ", ".join(parts)


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
