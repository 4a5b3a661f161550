"""What a family of checkpoints is: how its config.json spells the sizes, and what its tensors are called."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_accelerate.models.sizes import Sizes

MOST_LAYERS = 1000  # no GLM has a tenth of it; a number without end would be built without end
GATED_BY_SILU = ("silu", "swish", "swiglu")


@dataclass(frozen=True, slots=True)
class Family:
    """`outer` and `inner` map our tensor names to the checkpoint's; inner ones repeat in every layer."""

    name: str
    read: Callable[[Mapping[str, Any]], Sizes]
    layer_prefix: str  # of layer N, with {N}
    outer: Mapping[str, str]
    inner: Mapping[str, str]  # module names inside a layer
    ignored: tuple[str, ...] = ()  # names in files that carry no weight

    def theirs(self, ours: str) -> str:
        """`layers.3.mlp.down_proj.weight` in this family's words."""
        if not ours.startswith("layers."):
            return self.outer[ours]
        module, _, kind = ours.rpartition(".")
        return f"{self.module(module)}.{kind}"

    def module(self, ours: str) -> str:
        """A linear layer's name (without `.weight`) in this family's words; what it has no word for (the thin
        matrices and the shared projections of a compressed model) is called as here.
        """
        _, number, module = ours.split(".", 2)
        return f"{self.layer_prefix.format(N=number)}.{self.inner.get(module, module)}"


def whole(config: Mapping[str, Any], key: str, default: int | None = None, most: int | None = None) -> int:
    """A count in config.json."""
    value = config[key] if default is None else config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}: a whole number of 1 or more is expected")
    if most is not None and value > most:
        raise ValueError(f"{key} is {value!r}: at most {most:,} are expected")
    return value


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero in config.json."""
    value = config[key] if default is None else config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}: a number above 0 is expected")
    return float(value)


def check_attention(
    heads: tuple[str, int], kv_heads: tuple[str, int], rope: tuple[str, int], head_width: int
) -> None:
    """Each number with its key in config.json; `rope`: how many dimensions of a head are rotated."""
    if heads[1] % kv_heads[1]:
        raise ValueError(f"{heads[0]} {heads[1]} is not a multiple of {kv_heads[0]} {kv_heads[1]}")
    if not 2 <= rope[1] <= head_width or rope[1] % 2:
        expected = f"an even number up to {head_width} is expected"
        raise ValueError(f"by {rope[0]} {rope[1]} dimensions of a head are rotated: {expected}")


def check_activation(config: Mapping[str, Any]) -> None:
    """The gate of the MLP is SiLU in every GLM; another function would be computed wrongly."""
    if config.get("hidden_act", "silu") not in GATED_BY_SILU:
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported: silu is expected")
