"""Root-mean-square norms and the sums around them in C++ (native/norm.cpp). Any part may be left out:

    y = x + norm(branch) * after        out = norm(y) * before

S rows, H width.
"""

from typing import Any

import torch
from torch import Tensor

LANES = 16  # numbers that it takes at a time


def norms(
    x: Tensor, branch: Tensor | None, after_H: Tensor | None, before_H: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    """Those of (y, out) that are asked for: y with a branch, out with `before`. Without a branch y is x."""
    assert x.dtype == torch.bfloat16
    assert x.shape[-1] % LANES == 0
    return _Norms.apply(x, branch, after_H, before_H, epsilon)  # pyright: ignore[reportReturnType]


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        after_H: Tensor | None,
        before_H: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, ...]:
        wide = [None if weight is None else weight.detach().float() for weight in (after_H, before_H)]
        given_SH = None if branch is None else branch.flatten(0, -2)
        ops = torch.ops.glm_accelerate
        y_SH, out_SH, first_S, second_S = ops.norms(x.flatten(0, -2), given_SH, *wide, epsilon)
        ctx.save_for_backward(given_SH if after_H is not None else None, y_SH, first_S, second_S, *wide)
        ctx.dtypes = [None if weight is None else weight.dtype for weight in (after_H, before_H)]
        ctx.shape, ctx.has_branch = x.shape, branch is not None
        made = [] if branch is None else [y_SH.view(x.shape)]
        return (*made, out_SH.view(x.shape)) if before_H is not None else tuple(made)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        branch_SH, y_SH, first_S, second_S, after_H, before_H = ctx.saved_tensors
        rows = [slope.reshape(-1, ctx.shape[-1]).contiguous() for slope in slopes]
        of_y, of_out = rows[0] if ctx.has_branch else None, None if before_H is None else rows[-1]
        wants = ctx.needs_input_grad[2:4]
        made, made_branch, by_after, by_before = torch.ops.glm_accelerate.norms_back(
            of_y, of_out, y_SH, branch_SH, after_H, before_H, first_S, second_S, *wants
        )
        made = made.view(ctx.shape)
        through = None
        if ctx.has_branch:
            through = made if after_H is None else made_branch.view(ctx.shape)
        sums = ((by_after, wants[0], ctx.dtypes[0]), (by_before, wants[1], ctx.dtypes[1]))
        return made, through, *(total.to(dtype) if wanted else None for total, wanted, dtype in sums), None
