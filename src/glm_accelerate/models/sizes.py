"""The numbers that define a dense GLM, whatever spelling its config.json used."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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

    shared_qk: int = 1  # so many neighbouring layers have one query and one key projection between them
    # Of projections that are two thin matrices, by name (`layers.0.mlp.down_proj`): what `compress` writes.
    ranks: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)

    @property
    def plain(self) -> bool:
        """A GLM as it was published: nothing is shared or factored."""
        return self.shared_qk == 1 and not self.ranks
