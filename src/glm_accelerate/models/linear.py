"""The linear layer: a weight, which is dense or packed in few bits, and a LoRA adapter if one was added.

It computes in the dtype of its input, whatever dtype its weights are kept in: float32 master weights train
with bfloat16 products, with no autocast state and no second model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.float8 import MULTIPLE, float8_linear
from glm_accelerate.kernels.linear import add_adapter, linear, lora_linear
from glm_accelerate.kernels.quantized import Kind, Packed, pack, quantized_linear, unpack
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Adapter:
    """How a layer adds its lora_A (rank x inputs) and lora_B (outputs x rank)."""

    scale: float
    dropout: float


class PackedWeight(nn.Module):
    """A weight in four or eight bits a number. Its parts are parameters with a row for each output, which can
    be divided over ranks. `row`: how many numbers a row has that is packed, of which `inputs` are here.
    """

    def __init__(self, kind: Kind, weight_OI: Tensor) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.fill(weight_OI)

    def fill(self, weight_OI: Tensor) -> None:
        """Replace the packed weight by this one."""
        packed = pack(self.kind, weight_OI.detach())
        self.inputs = self.row = packed.inputs
        self.codes = nn.Parameter(packed.codes_OP, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        levels = packed.levels_OK
        self.levels = None if levels is None else nn.Parameter(levels, requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, self._packed(), None if bias is None else bias.to(x.dtype))

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`."""
        return unpack(self._packed(), dtype)

    def _packed(self) -> Packed:
        return Packed(self.kind, self.inputs, self.codes, self.scales, self.levels)


class Linear(nn.Module):
    """out = x W^T + b + scale * dropout(x) A^T B^T. W is `weight` or `packed`; A and B are there if `adapter`
    is. Weights are loaded or initialised from outside.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    native = False  # set by `models.bind`: products by our own code
    float8: Literal["off", "hardware", "simulated"] = "off"  # products with a dense weight in 8 bits
    _copy: Tensor | None = None
    _copied = 0  # version of the weight

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.packed: PackedWeight | None = None
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return linear(x, self.weight, self.bias, self.native, self.copy)
        if self.adapter is None:
            return self._product(x)
        A, B, scale = self.lora_A, self.lora_B, self.adapter.scale
        dropout = self.adapter.dropout if self.training else 0.0
        if self.packed is None and self.float8 == "off":
            weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
            return lora_linear(x, weight, bias, A, B, scale=scale, dropout=dropout, native=self.native)
        rows = (
            x.flatten(0, -2) if self.packed is None else x
        )  # a result that is added to in place must be no view
        out = add_adapter(self._product(rows), rows, A, B, scale=scale, dropout=dropout)
        return out if self.packed is not None else out.view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        """With a packed weight, or in 8 bits."""
        if self.packed is not None:
            return self.packed(x, self.bias)
        return float8_linear(x, self.weight, self.bias, simulated=self.float8 == "simulated")

    @property
    def plain(self) -> bool:
        """A dense weight alone, multiplied in the dtype of x."""
        return self.packed is None and self.adapter is None and self.float8 == "off"

    @property
    def inputs(self) -> int:
        return self.weight.shape[1] if self.packed is None else self.packed.inputs

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] if self.packed is None else self.packed.codes.shape[0]

    def pack(self, kind: Kind) -> None:
        """Keep the weight in few bits from now on."""
        self.packed = PackedWeight(kind, self.weight)
        del self.weight

    def adapt(self, A_rI: Tensor, B_Or: Tensor, adapter: Adapter) -> None:
        """Add an adapter, which trains."""
        self.lora_A, self.lora_B, self.adapter = nn.Parameter(A_rI), nn.Parameter(B_Or), adapter

    def merge(self) -> None:
        """Add the adapter into the weight and drop it: the same without dropout."""
        if self.adapter is None:
            return
        if self.packed is not None:
            cure = "merge into the model as its files have it"
            raise UserError("a quantised base takes no adapter in", cure=cure)
        with torch.no_grad():
            delta = self.adapter.scale * (self.lora_B.float() @ self.lora_A.float())
            merged = (self.weight.float() + delta).to(self.weight.dtype)
        self.weight, self.adapter = nn.Parameter(merged, requires_grad=False), None
        self.float8 = "off"
        del self.lora_A, self.lora_B

    @property
    def copy(self) -> Tensor | None:
        """The weight in the dtype of products, if a copy is kept. Code that changes the weight without torch
        counting it, as our optimizer does, updates the copy, too; after every other change it is made again.
        """
        if self._copy is not None and self._copied != self.weight._version:  # pyright: ignore[reportPrivateUsage]
            self.keep_copy(self._copy.dtype)
        return self._copy

    def keep_copy(self, dtype: torch.dtype) -> Tensor:
        """Keep a copy of the weight from now on, in the same memory if there was one."""
        weight = self.weight.detach()
        self._copy = weight.to(dtype, copy=True) if self._copy is None else self._copy.copy_(weight)
        self._copied = self.weight._version  # pyright: ignore[reportPrivateUsage]
        return self._copy

    def learn_in(self, dtype: torch.dtype) -> None:
        """The dtype of the weight's next gradient, if it is multiplied as a copy."""
        if self._copy is not None:
            self.weight.grad_dtype = dtype


class LowRank(nn.Module):
    """out = (x @ inner.T) @ outer.T + bias: two ordinary layers, quantised, adapted and trained as such."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.inner, self.outer = Linear(inputs, rank, bias=False), Linear(rank, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def projection(sizes: Sizes, name: str, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    """A projection of a block, as `layers.0.mlp.down_proj`: two thin layers if `Sizes.ranks` has its rank."""
    rank = sizes.ranks.get(name)
    return Linear(inputs, outputs, bias) if rank is None else LowRank(inputs, outputs, rank, bias)


def projection_of(layer: str) -> str:
    """The name of the projection that a linear layer is, or is a half of."""
    return layer.removesuffix(".inner").removesuffix(".outer")


def linear_layers(model: nn.Module) -> list[tuple[str, Linear]]:
    """Every linear layer inside the blocks; one that several blocks share by its first name."""
    inside = ((name, module) for name, module in model.named_modules() if name.startswith("layers."))
    return [(name, module) for name, module in inside if isinstance(module, Linear)]


def float8_products(model: nn.Module, *, simulated: bool = False) -> list[str]:
    """Switch the layers inside the blocks to 8-bit products, in place. Returns the names of those whose sizes
    the hardware cannot take.
    """
    left: list[str] = []
    for name, layer in linear_layers(model):
        if layer.inputs % MULTIPLE or layer.outputs % MULTIPLE:
            left.append(name)
        else:
            layer.float8 = "simulated" if simulated else "hardware"
    return left
