"""The gated unit of GLM's MLP: the activation is on the first half."""

from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
