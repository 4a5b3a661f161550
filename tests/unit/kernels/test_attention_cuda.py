"""Packed attention on the GPU itself, by every path that this machine has."""

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.attention import attention, attention_reference
from glm_accelerate.kernels.choose import FLASH, FLEX, VARLEN, Facts, attention_path, facts_of
from glm_accelerate.kernels.varlen_attention import Documents, varlen_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CUDA = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]


def available(path: str) -> bool:
    facts: Facts = facts_of(CUDA)
    had = {VARLEN: facts.torch_flash, FLASH: facts.flash_attn, FLEX: facts.triton}
    return had[path] and facts.capability >= (8, 0)


def leaves(tokens: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 8, width), (tokens, 2, width), (tokens, 2, width))
    drawn = [torch.randn(shape, generator=generator).to(CUDA, dtype) for shape in shapes]
    return [x.requires_grad_(True) for x in drawn]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    slope = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tiles", "width"), [((1, 300, 127, 128, 444), 128), ((7,), 64), ((513, 3), 128)])
@pytest.mark.parametrize("path", [VARLEN, FLASH, FLEX])
def test_house_rule(path: str, tiles: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    """err <= 2 err(plain PyTorch) + 1 ulp, against float64: output and the three gradients."""
    if not available(path):
        pytest.skip(f"no {path}")
    inputs = leaves(sum(tiles), width, dtype)
    mine = with_gradients(varlen_attention(path, *inputs, Documents.of(tiles, CUDA)), inputs)  # type: ignore[call-arg]
    plain = with_gradients(attention_reference(*(x[None] for x in inputs), tiles)[0], inputs)
    wide = [x.detach().double().requires_grad_(True) for x in inputs]
    exact = with_gradients(attention_reference(*(x[None] for x in wide), tiles)[0], wide)
    for value, other, truth in zip(mine, plain, exact, strict=True):
        ulp = torch.finfo(dtype).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


@pytest.mark.parametrize("path", [VARLEN, FLASH])
def test_prefix(path: str) -> None:
    """Seen whole by every token, as in attention by document; its gradient too."""
    if not available(path):
        pytest.skip(f"no {path}")
    tiles, inputs = (40, 1, 87), leaves(128, 128, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    prefix = tuple(torch.randn(2, 5, 128, generator=generator).to(CUDA).requires_grad_(True) for _ in "kv")
    mine = varlen_attention(path, *inputs, Documents.of(tiles, CUDA), prefix)
    other = attention(*(x[None] for x in inputs), tiles, prefix)[0]
    for value, truth in zip(
        with_gradients(mine, [*inputs, *prefix]), with_gradients(other, [*inputs, *prefix]), strict=True
    ):
        assert (value - truth).abs().max() <= 0.03 * truth.abs().max()


@pytest.mark.parametrize("path", [VARLEN, FLASH])
def test_bits_are_the_same_twice_where_asked(path: str) -> None:
    if not available(path):
        pytest.skip(f"no {path}")
    inputs = leaves(1000, 128, torch.bfloat16)
    documents = Documents.of((600, 400), CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (with_gradients(varlen_attention(path, *inputs, documents), inputs) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_this_device_gets_a_path_that_runs() -> None:
    for dtype in (torch.float32, *HALF):
        inputs = leaves(100, 128, dtype)
        path, _ = attention_path(facts_of(CUDA), dtype, 128, training=True)
        if path in (VARLEN, FLASH, FLEX):
            out = varlen_attention(path, *inputs, Documents.of((60, 40), CUDA))
        else:
            out = attention(*(x[None] for x in inputs), (60, 40))[0]
        assert all(x.isfinite().all() for x in with_gradients(out, inputs))
