"""How many floating-point operations a step needs, and how many the device can do: their ratio is the model's
FLOP utilisation. Counted is what the mathematics needs: no padding, no recomputing, no masked half.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_accelerate.models.sizes import Sizes

# Dense bfloat16 products a second with float32 sums, from the makers' data sheets, by a part of the name.
DATA_SHEETS = {
    "B200": 2250e12,
    "H20": 148e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
SIDES = {"cuda": 8192, "cpu": 2048}  # of the square product that stands for the device's best
SECONDS = 1.0  # for which it is repeated


@dataclass(frozen=True, slots=True)
class Trained:
    """What of a model is trained, as far as it changes what a backward pass has to compute."""

    method: str = "full"  # lora, full, freeze or prefix
    layers: int = 0  # freeze: how many of the last
    prefix_tokens: int = 0  # prefix: how many stand before each document


@dataclass(frozen=True, slots=True)
class Peak:
    """Products a second of a device."""

    measured: float
    dtype: str
    data_sheet: float | None  # of its maker, in bfloat16, where its name is known


def linear_parameters(sizes: Sizes) -> int:
    """Weights of the linear layers of one block."""
    query, key = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    return sizes.width * (2 * query + 2 * key) + 3 * sizes.width * sizes.mlp_width


def step_flops(sizes: Sizes, trained: Trained, lengths: Sequence[int], targets: int) -> float:
    """Of documents of these lengths, forward and backward."""
    return product_flops(sizes, trained, sum(lengths), targets) + attention_flops(sizes, trained, lengths)


def product_flops(sizes: Sizes, trained: Trained, tokens: int, targets: int) -> float:
    """2N a token forward, 2N for the gradient of the input, 2N for that of weights that train: 4N for LoRA,
    6N for full. N are the linear layers of the blocks, and for rows with a target the head. What an adapter
    itself multiplies is below a hundredth and left out.
    """
    deep = _deep(sizes, trained)
    blocks = sizes.layers + (2 if trained.method in ("full", "freeze") else 1) * deep
    head = 3 if trained.method == "full" else 2
    return 2.0 * (
        linear_parameters(sizes) * tokens * blocks + sizes.vocabulary * sizes.width * targets * head
    )


def attention_flops(sizes: Sizes, trained: Trained, lengths: Sequence[int]) -> float:
    """Two products forward and four backward, over the causal half of each document and all of a prefix."""
    pairs = sum(length * (length + 1) / 2 + length * trained.prefix_tokens for length in lengths)
    products = 2 * sizes.layers + 4 * _deep(sizes, trained)
    return 2.0 * sizes.heads * sizes.head_width * pairs * products


def _deep(sizes: Sizes, trained: Trained) -> int:
    """Through how many layers the gradient goes."""
    return min(trained.layers, sizes.layers) if trained.method == "freeze" else sizes.layers


def peak(device: torch.device, compute: str, seconds: float = SECONDS) -> Peak:
    """Measured by the largest product that training could hope for: the best of a second of them."""
    dtype = torch.float32 if compute == "float32" else torch.bfloat16  # fp8 too is judged by bfloat16
    side = SIDES[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best, ends = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < ends:
        best = min(best, _seconds(left, right, 4 if device.type == "cuda" else 1))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Peak(2 * side**3 / best, str(dtype).removeprefix("torch."), data_sheet(name))


def data_sheet(name: str) -> float | None:
    """By whole words, the most of them: an H200 is no H20, and an L40 no L4."""
    words = name.split()
    found = [known for known in DATA_SHEETS if set(known.split()) <= set(words)]
    return DATA_SHEETS[max(found, key=len)] if found else None


def _seconds(left: torch.Tensor, right: torch.Tensor, times: int) -> float:
    on_gpu = left.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(left, right)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
