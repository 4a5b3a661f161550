"""GLM's gated MLP: one matrix makes gate and up."""

from torch import Tensor, nn

from glm_accelerate.kernels.choose import Form, form_now
from glm_accelerate.kernels.swiglu import swiglu
from glm_accelerate.models.projection import projection
from glm_accelerate.models.sizes import Sizes


class MLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        name = f"layers.{layer}.mlp"
        self.gate_up_proj = projection(sizes, f"{name}.gate_up_proj", sizes.width, 2 * sizes.mlp_width)
        self.down_proj = projection(sizes, f"{name}.down_proj", sizes.mlp_width, sizes.width)
        self.form: Form = "eager"

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x), form_now(self.form, self.training)))
