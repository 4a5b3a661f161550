"""8-bit products of the linear layers inside a model's blocks, switched on from outside. The head, norms and
attention stay as they are.
"""

from glm_accelerate.kernels.float8 import MULTIPLE
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import linear_layers


def float8_products(model: Decoder, *, simulated: bool = False) -> list[str]:
    """For every layer whose sizes the hardware can take, in place; the names of those that it cannot."""
    left: list[str] = []
    for name, layer in linear_layers(model):
        if layer.inputs % MULTIPLE or layer.outputs % MULTIPLE:
            left.append(name)
        else:
            layer.float8 = "simulated" if simulated else "hardware"
    return left
