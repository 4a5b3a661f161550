"""A linear layer that computes in the dtype of its input, whatever dtype its weights are kept in.

So float32 master weights train with bfloat16 products, with no autocast state and no second model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.product import linear


class Linear(nn.Module):
    """out = x @ weight.T + bias. Made empty: weights are loaded or initialised from outside."""

    native = False  # set by `models.bind`: products by our own code
    _copy: Tensor | None = None
    _copied = 0  # version of the weight

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.native, self.copy)

    @property
    def copy(self) -> Tensor | None:
        """The weight as it is multiplied, if that is kept beside it. Who changes the weight without torch
        counting it, as our optimizer does, writes the copy, too; after every other change it is made anew.
        """
        if self._copy is not None and self._copied != self.weight._version:  # pyright: ignore[reportPrivateUsage]
            self.keep_copy(self._copy.dtype)
        return self._copy

    def keep_copy(self, dtype: torch.dtype) -> Tensor:
        """Have a copy of the weight from now on, in the same memory if there was one."""
        now = self.weight.detach()
        self._copy = now.to(dtype, copy=True) if self._copy is None else self._copy.copy_(now)
        self._copied = self.weight._version  # pyright: ignore[reportPrivateUsage]
        return self._copy

    def learn_in(self, dtype: torch.dtype) -> None:
        """The dtype of the weight's next gradient, if it is multiplied as a copy."""
        if self._copy is not None:
            self.weight.grad_dtype = dtype

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


def linear_layers(model: nn.Module) -> list[tuple[str, Linear]]:
    """Every linear layer inside the blocks; one that several blocks share by its first name."""
    found = ((name, module) for name, module in model.named_modules() if name.startswith("layers."))
    return [(name, module) for name, module in found if isinstance(module, Linear)]


def replace_layers(model: nn.Module, names: Iterable[str], make: Callable[[Linear], Linear]) -> None:
    """Put `make(layer)` in all places of each of these layers, one after the other, in place."""
    places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in model.modules():
        for leaf, child in owner.named_children():
            places[id(child)].append((owner, leaf))
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear)
        made = make(layer)
        for owner, leaf in places[id(layer)]:
            setattr(owner, leaf, made)
