"""GLM's gated MLP: one matrix makes gate and up."""

from torch import Tensor, nn

from glm_accelerate.kernels.choose import Form, form_now
from glm_accelerate.kernels.swiglu import swiglu
from glm_accelerate.models.linear import Linear
from glm_accelerate.models.sizes import Sizes


class MLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up_proj = Linear(sizes.width, 2 * sizes.mlp_width, bias=False)
        self.down_proj = Linear(sizes.mlp_width, sizes.width, bias=False)
        self.form: Form = "eager"

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x), form_now(self.form, self.training)))
