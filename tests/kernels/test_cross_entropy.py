"""Triton's cross-entropy by the house rule, in float32 and float16: the interpreter truncates bfloat16."""

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from glm_accelerate.kernels.triton_cross_entropy import BLOCK, loss_and_gradient

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype`, as float64: rounding the inputs is not the kernel's doing."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype).double()


def labels_of(rows: int, vocabulary: int) -> Tensor:
    """Both ends among them."""
    made = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(9))
    made[0] = vocabulary - 1
    made[-1] = 0
    return made.to(DEVICE)


def judged(mine: Tensor, plain: Tensor, exact: Tensor) -> None:
    """err(mine) <= 2 err(plain) + 1 ulp of the largest value."""
    ulp = torch.finfo(mine.dtype).eps * exact.abs().max().item()
    error = (mine.double() - exact).abs().max().item()
    assert error <= 2 * (plain.double() - exact).abs().max().item() + ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 2), (3, 17), (5, BLOCK), (2, BLOCK + 1), (3, 3 * BLOCK - 1), (2, 151_552)]
)
def test_loss_and_gradient(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Odd widths, whole and broken blocks, GLM's vocabulary, and logits that need the running maximum."""
    logits, labels = drawn(rows, vocabulary, seed=0, dtype=dtype) * 16, labels_of(rows, vocabulary)

    def plain(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        x = logits.to(kind).requires_grad_(True)
        wide = x if kind == torch.float64 else x.float()
        losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
        return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]

    written = logits.to(dtype)
    losses = loss_and_gradient(written, labels, boost=1.0, wants_gradient=True)
    for mine, other, exact in zip((losses, written), plain(dtype), plain(torch.float64), strict=True):
        judged(mine, other, exact)


def test_logits_stay_where_no_slope_is_wanted() -> None:
    logits, labels = drawn(3, 1000, seed=0, dtype=torch.float32).float(), labels_of(3, 1000)
    before = logits.clone()
    losses = loss_and_gradient(logits, labels, boost=1.0, wants_gradient=False)
    assert torch.equal(logits, before)
    assert torch.allclose(losses, torch.nn.functional.cross_entropy(before, labels, reduction="none"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
def test_what_is_not_finite_shows() -> None:
    """An overflow makes its own row's loss not a number, so that the step is seen and skipped."""
    logits, labels = drawn(3, 100, seed=0, dtype=torch.float32).float(), labels_of(3, 100)
    logits[1, 7] = float("inf")
    losses = loss_and_gradient(logits, labels, boost=1.0, wants_gradient=True)
    assert losses.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 8, 17), (70, 33, 131), (3, 16, 20_001)])
def test_the_whole_operator(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Loss and both gradients, with a loss scale on top, against float64."""
    hidden = drawn(rows, width, seed=0, dtype=dtype)
    weight = (drawn(vocabulary, width, seed=1, dtype=dtype) * 0.3).to(dtype).double()
    labels = labels_of(rows, vocabulary)

    def outcome(kind: torch.dtype, mine: bool) -> list[Tensor]:
        h, w = (x.to(kind).requires_grad_(True) for x in (hidden, weight))
        if mine:
            loss = linear_cross_entropy(h, w, labels, form="triton")
        else:
            loss = linear_cross_entropy_reference(h, w, labels)
        return [loss.detach(), *torch.autograd.grad(loss * 37.0, (h, w))]

    exact, plain = outcome(torch.float64, False), outcome(dtype, False)
    for mine, other, truth in zip(outcome(dtype, True), plain, exact, strict=True):
        judged(mine, other, truth)


def test_no_rows() -> None:
    hidden = torch.empty(0, 8, device=DEVICE).requires_grad_(True)
    loss = linear_cross_entropy(
        hidden,
        torch.ones(131, 8, device=DEVICE),
        torch.empty(0, dtype=torch.long, device=DEVICE),
        form="triton",
    )
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
