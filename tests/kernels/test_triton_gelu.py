"""GELU and GEGLU as Triton kernels, by the house rule."""

from collections.abc import Callable

import pytest
from torch import Tensor

from glm_accelerate.kernels.gelu import Shape, geglu, geglu_reference, gelu, gelu_reference


@pytest.mark.parametrize("shape", ["tanh", "none"])
@pytest.mark.parametrize("size", [(1, 2), (2, 3, 122), (3, 2 * 1025)])
def test_gelu(
    shape: Shape, size: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]
) -> None:
    inputs = [numbers(*size) * 3]
    judge(lambda x: gelu(x, shape, "triton"), lambda x: gelu_reference(x, shape), inputs)
    judge(lambda x: geglu(x, shape, "triton"), lambda x: geglu_reference(x, shape), inputs)
