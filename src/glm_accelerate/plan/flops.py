"""How many floating-point operations training needs. Counted is what the mathematics needs: no padding, no
recomputing, no masked half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Trained:
    """What of a model is trained, as far as it changes what a backward pass has to compute."""

    method: str = "full"  # lora, full, freeze or prefix
    layers: int = 0  # freeze: how many of the last
    prefix_tokens: int = 0  # prefix: how many stand before each document


def step_flops(sizes: Sizes, trained: Trained, lengths: Sequence[int], targets: int) -> float:
    """Of documents of these lengths, forward and backward."""
    tokens = int(np.sum(lengths, dtype=np.int64))
    return product_flops(sizes, trained, tokens, targets) + attention_flops(sizes, trained, lengths)


def product_flops(sizes: Sizes, trained: Trained, tokens: float, targets: float) -> float:
    """2N a token forward, 2N for the gradient of the input, 2N for that of weights that train: 4N for LoRA,
    6N for full. N are the linear layers of the blocks, and for rows with a target the head. What an adapter
    itself multiplies is below a hundredth and left out.
    """
    shapes, first = shapes_of(sizes), sizes.layers - _deep(sizes, trained)
    deep = sum(shapes.of_block(block) for block in range(first, sizes.layers))
    products = shapes.multiplied + (2 if trained.method in ("full", "freeze") else 1) * deep
    head = 3 if trained.method == "full" else 2
    return 2.0 * (products * tokens + sizes.vocabulary * sizes.width * targets * head)


def attention_flops(sizes: Sizes, trained: Trained, lengths: Sequence[int]) -> float:
    """Of documents of these lengths, over the causal half of each and all of a prefix."""
    return attended_flops(sizes, trained, pairs(lengths, trained.prefix_tokens))


def attended_flops(sizes: Sizes, trained: Trained, attended: float) -> float:
    """Two products forward and four backward for so many pairs of tokens."""
    products = 2 * sizes.layers + 4 * _deep(sizes, trained)
    return 2.0 * sizes.heads * sizes.head_width * attended * products


def forward_flops(sizes: Sizes, tokens: float, attended: float) -> float:
    """Of the blocks alone, once: what recomputing all of them costs. `attended`: pairs of tokens."""
    attention = 2 * sizes.heads * sizes.head_width * attended
    return 2.0 * (shapes_of(sizes).multiplied * tokens + sizes.layers * attention)


def pairs(lengths: Sequence[int] | NDArray[np.int32], prefix_tokens: int = 0) -> float:
    """How many tokens see how many, over all documents."""
    each = np.asarray(lengths, dtype=np.float64)
    return float((each * (each + 1) / 2 + each * prefix_tokens).sum())


def _deep(sizes: Sizes, trained: Trained) -> int:
    """Through how many layers the gradient goes."""
    return min(trained.layers, sizes.layers) if trained.method == "freeze" else sizes.layers
