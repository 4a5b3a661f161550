"""How the config.json of a compressed model says what of it is shared and factored (`export/compress.py`).

{"model_type": "glm-accelerate", "structure": {"share_qk": 2, "ranks": {...}}, "model": {...}}

`model` is the plain model's config.json, `ranks` as in `Sizes`. No other program opens it by mistake.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from glm_accelerate.models.sizes import Sizes
from glm_accelerate.runtime.errors import UserError

MODEL_TYPE = "glm-accelerate"


@dataclass(frozen=True, slots=True)
class Compression:
    """What was done to a plain model."""

    shared_qk: int = 1
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])

    def applied_to(self, plain: Sizes) -> Sizes:
        """One matrix of queries, keys and values is split where queries and keys are shared."""
        fused = plain.fused_qkv and self.shared_qk == 1
        return replace(plain, shared_qk=self.shared_qk, ranks=self.ranks, fused_qkv=fused)


def describe(sizes: Sizes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a compressed model; `config`: the plain one's."""
    structure = {"share_qk": sizes.shared_qk, "ranks": dict(sizes.ranks)}
    return {"model_type": MODEL_TYPE, "structure": structure, "model": dict(config)}


def described(config: dict[str, Any], where: object) -> tuple[dict[str, Any], Compression]:
    """The plain model's config.json, and what was done to it; of a plain model nothing."""
    if config.get("model_type") != MODEL_TYPE:
        return config, Compression()
    inside, structure = config.get("model"), config.get("structure")
    if isinstance(inside, dict) and isinstance(structure, dict):
        share, ranks = structure.get("share_qk"), structure.get("ranks")
        if _positive(share) and isinstance(ranks, dict) and all(map(_positive, ranks.values())):
            return inside, Compression(share, ranks)
    raise UserError("does not say how the model is compressed", where=where, cure="compress it again")


def said_of(sizes: Sizes) -> str:
    """What is shared and factored, for people."""
    share, ranks = sizes.shared_qk, sizes.ranks.values()
    parts = [f"each {share} layers share queries and keys"] if share > 1 else []
    parts += [f"{len(ranks)} matrices factored at ranks {min(ranks)} to {max(ranks)}"] if ranks else []
    return ", ".join(parts)


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
