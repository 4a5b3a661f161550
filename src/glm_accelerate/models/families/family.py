"""What a family of checkpoints is: how its config.json spells the sizes, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_accelerate.models.sizes import Sizes


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
        _, number, rest = ours.split(".", 2)
        module, _, kind = rest.rpartition(".")
        return f"{self.layer_prefix.format(N=number)}.{self.inner[module]}.{kind}"

    def module(self, ours: str) -> str:
        """A linear layer's name (without `.weight`) in this family's words."""
        _, number, module = ours.split(".", 2)
        return f"{self.layer_prefix.format(N=number)}.{self.inner[module]}"
