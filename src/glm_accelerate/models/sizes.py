"""The numbers that define a dense GLM, whatever spelling its config.json used."""

from dataclasses import dataclass


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

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = self.width * (query + 2 * key) + (query + 2 * key) * self.qkv_bias + query * self.width
        mlp = 3 * self.width * self.mlp_width
        norms = (4 if self.sandwich else 2) * self.width
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * (attention + mlp + norms) + embeddings + self.width
