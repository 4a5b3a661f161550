# pyright: basic, reportMissingImports=false, reportCallIssue=false
"""silu(first half) * second half as one Triton kernel each way. A program takes a piece of a row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_accelerate.kernels.grid import STEP, STEP_WARPS, rows_of


@triton.jit
def _forward(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    here = gate_up + row * stride + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate_up, grad_gate_up, grad_stride, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    here = gate_up + row * stride + column
    along = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = along * up * share * (1 + gate * (1 - share))
    grad_up = along * gate * share
    there = grad_gate_up + row * 2 * width + column
    tl.store(there, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(there + width, grad_up.to(grad_gate_up.dtype.element_ty), mask=inside)


class TritonSwiGLU(torch.autograd.Function):
    """Keeps its input alone, and computes the gate again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        assert gate_up.dtype != torch.float64  # computed in float32
        rows = rows_of(gate_up)
        (S, _), F = rows.shape, rows.shape[1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], F))
        if S:
            _forward[(S, triton.cdiv(F, STEP))](
                rows, out, rows.stride(0), F, BLOCK=STEP, num_warps=STEP_WARPS
            )
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, grad = rows_of(gate_up), rows_of(grad_outputs[0])
        (S, F), grad_gate_up = grad.shape, torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        if S:
            _backward[(S, triton.cdiv(F, STEP))](
                grad, rows, grad_gate_up, grad.stride(0), rows.stride(0), F, BLOCK=STEP, num_warps=STEP_WARPS
            )
        return grad_gate_up
