"""8-bit products in a model, switched on from outside: linear layers inside the blocks are swapped for ones
that keep the same tensors under the same names. The head, norms and attention stay as they are.
"""

from torch import Tensor, nn

from glm_accelerate.kernels.float8 import MULTIPLE, float8_linear
from glm_accelerate.kernels.lora import add_adapter
from glm_accelerate.models.adapt.lora import LoraLinear
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear, linear_layers, replace_layers


class Float8Linear(Linear):
    """A linear layer with 8-bit products."""

    def __init__(self, around: Linear, simulated: bool) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.simulated = around.weight, around.bias, simulated

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.bias, simulated=self.simulated)


class Float8LoraLinear(LoraLinear):
    """The frozen product in 8 bits; the adapter's two, which are thin and learn, in x's dtype."""

    def __init__(self, around: LoraLinear, simulated: bool) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.simulated = around.weight, around.bias, simulated
        self.lora_A, self.lora_B = around.lora_A, around.lora_B
        self.scale, self.share = around.scale, around.share

    def forward(self, x: Tensor) -> Tensor:
        share = self.share if self.training else 0.0
        x_SI = x.flatten(0, -2)
        out_SO = float8_linear(x_SI, self.weight, self.bias, simulated=self.simulated)
        out_SO = add_adapter(out_SO, x_SI, self.lora_A, self.lora_B, scale=self.scale, dropout=share)
        return out_SO.view(*x.shape[:-1], -1)


def float8_products(model: Decoder, *, simulated: bool = False) -> list[str]:
    """Swap every layer whose sizes the hardware can take, in place; the names of those that it cannot."""

    def swapped(layer: Linear) -> Linear:
        if isinstance(layer, LoraLinear):
            return Float8LoraLinear(layer, simulated)
        return Float8Linear(layer, simulated)

    layers = linear_layers(model)
    left = [name for name, layer in layers if layer.inputs % MULTIPLE or layer.outputs % MULTIPLE]
    replace_layers(model, [name for name, _ in layers if name not in left], swapped)
    return left
