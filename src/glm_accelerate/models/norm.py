"""RMSNorm as a module."""

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.choose import Form, form_now
from glm_accelerate.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """One weight a feature."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon
        self.form: Form = "eager"

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, form_now(self.form, self.training))
