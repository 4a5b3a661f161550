"""Linear and cross-entropy: chunks, half precision, loss scaling and odd inputs. The house rule in float32
and bfloat16 is in test_kernels.py, the Triton form in tests/kernels/.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.compiled import missing
from glm_accelerate.kernels.linear_cross_entropy import (
    CPU_BYTES,
    GPU_BYTES,
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from glm_accelerate.kernels.native.build import load as native_library

GLM = 151_552
FORMS: list[Form] = ["eager"] if missing("cpu") else ["eager", "compiled"]


def drawn(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded to `dtype`, as float64: rounding the inputs is not the kernel's doing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * 0.3
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden.to(dtype).double(), weight.to(dtype).double(), labels


@pytest.mark.parametrize("rows", [1, 64, 65, 832, 4096, 4097])
@pytest.mark.parametrize(
    ("vocabulary", "itemsize", "budget"), [(GLM, 2, GPU_BYTES), (GLM, 4, CPU_BYTES), (131, 4, CPU_BYTES)]
)
def test_chunks_are_even_and_fit(rows: int, vocabulary: int, itemsize: int, budget: int) -> None:
    each = chunk_rows(rows, vocabulary, itemsize, budget)
    assert each % 64 == 0
    assert each * vocabulary * itemsize <= budget
    chunks = math.ceil(rows / each)
    most = budget // (vocabulary * itemsize) // 64 * 64
    assert chunks == math.ceil(rows / most)  # no more of them than fit
    assert chunks == 1 or rows - (chunks - 1) * each > each - 64 * chunks  # and the last is not a crumb


def test_a_budget_smaller_than_64_rows_still_gets_them() -> None:
    assert chunk_rows(1000, GLM, 4, 2**20) == 64
    assert chunk_rows(0, GLM, 4, 2**20) == 64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 65_536.0 / 130])
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 8, 17), (130, 33, 70_001)])
def test_float16(rows: int, width: int, vocabulary: int, scale: float, form: Form) -> None:
    """House rule, with and without a loss scale: a wide softmax has slopes that are subnormal in float16."""
    hidden, weight, labels = drawn(rows, width, vocabulary, torch.float16)

    def run(dtype: torch.dtype, mine: bool) -> list[Tensor]:
        h, w = (x.to(dtype).requires_grad_(True) for x in (hidden, weight))
        if mine:
            loss = linear_cross_entropy(h, w, labels, form=form)
        else:
            loss = linear_cross_entropy_reference(h, w, labels)
        return [loss.detach(), *torch.autograd.grad(loss * scale, (h, w))]

    exact, plain = run(torch.float64, False), run(torch.float16, False)
    for value, other, truth in zip(run(torch.float16, True), plain, exact, strict=True):
        ulp = torch.finfo(value.dtype).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("form", FORMS)
def test_large_logits(form: Form) -> None:
    """House rule in float32 where the normalizer is 60: subtracted at once, its rounding would show."""
    hidden, weight, labels = drawn(70, 64, 1_000, torch.float32)

    def run(dtype: torch.dtype, mine: bool) -> list[Tensor]:
        h = (hidden * 8).to(dtype).requires_grad_(True)
        if mine:
            loss = linear_cross_entropy(h, weight.to(dtype), labels, form=form)
        elif dtype == torch.float64:
            loss = cross_entropy(h @ weight.T, labels, reduction="sum")
        else:
            loss = linear_cross_entropy_reference(h, weight.to(dtype), labels)
        return [loss.detach(), *torch.autograd.grad(loss, h)]

    exact, plain = run(torch.float64, False), run(torch.float32, False)
    for value, other, truth in zip(run(torch.float32, True), plain, exact, strict=True):
        ulp = torch.finfo(value.dtype).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


def test_float16_slopes_that_float16_cannot_hold() -> None:
    """Every other word has probability 1 / 151,552: without a boost a hundredth of the gradient is lost."""
    rows, width = 4, 16
    hidden = torch.full((rows, width), 0.01, dtype=torch.float16).requires_grad_(True)
    weight = torch.ones(GLM, width, dtype=torch.float16)
    weight[0] = 0.0  # the only label
    labels = torch.zeros(rows, dtype=torch.long)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert hidden.grad is not None
    wide = hidden.detach().double().requires_grad_(True)
    linear_cross_entropy_reference(wide, weight.double(), labels).backward()
    assert wide.grad is not None
    assert (hidden.grad.double() / wide.grad - 1).abs().max() < 2e-3


def test_the_loss_of_bfloat16_is_summed_in_float32() -> None:
    """2,048 losses of about 10: a bfloat16 sum stops growing long before (torch 2.13's chunked form does)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2_048, 8, generator=generator).bfloat16()
    weight = (torch.randn(10_007, 8, generator=generator) * 0.3).bfloat16()
    labels = torch.randint(0, 10_007, (2_048,), generator=generator)
    mine = linear_cross_entropy(hidden, weight, labels)
    exact = linear_cross_entropy_reference(hidden.double(), weight.double(), labels)
    assert mine.dtype == torch.float32
    assert abs(mine.item() / exact.item() - 1) < 1e-4


def test_a_small_factor_on_the_loss_is_not_rounded() -> None:
    """1 / targets in bfloat16 would be off by up to 0.4 %, all gradients alike."""
    hidden, weight, labels = drawn(50, 32, 131, torch.bfloat16)

    def mean_of(factor: float) -> Tensor:
        h = hidden.bfloat16().requires_grad_(True)
        (linear_cross_entropy(h, weight.bfloat16(), labels) * factor).backward()
        assert h.grad is not None
        return h.grad.double()

    ratio = (mean_of(1 / 1237) / mean_of(1.0) * 1237 - 1).mean()
    assert abs(ratio) < 2e-4


@pytest.mark.parametrize("vocabulary", [2, 131, GLM])
def test_labels_at_both_ends(vocabulary: int) -> None:
    hidden, weight, _ = drawn(2, 4, vocabulary, torch.float32)
    labels = torch.tensor([0, vocabulary - 1])
    h, w = hidden.requires_grad_(True), weight.requires_grad_(True)
    exact = torch.autograd.grad(linear_cross_entropy_reference(h, w, labels), (h, w))
    h, w = hidden.detach().float().requires_grad_(True), weight.detach().float().requires_grad_(True)
    mine = torch.autograd.grad(linear_cross_entropy(h, w, labels), (h, w))
    # A sum of V rounded terms is off by about sqrt(V) units of the sum of their sizes, in whatever order.
    wide_h, wide_w = hidden.detach().double(), weight.detach().double()
    share = (wide_h @ wide_w.T).softmax(-1)
    share[range(2), labels] -= 1
    sizes = (share.abs() @ wide_w.abs(), share.abs().T @ wide_h.abs())
    unit = torch.finfo(torch.float32).eps
    for value, truth, size in zip(mine, exact, sizes, strict=True):
        assert ((value.double() - truth).abs() <= (16 + vocabulary**0.5) * unit * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_row_has_a_target(dtype: torch.dtype) -> None:
    """A batch of prompts alone: a loss of nothing, and gradients that are zero, not missing."""
    hidden = torch.empty(0, 8, dtype=dtype).requires_grad_(True)
    weight = torch.ones(131, 8, dtype=dtype).requires_grad_(True)
    loss = linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 8)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_no_gradient_is_made_where_none_is_asked_for() -> None:
    """Of a frozen head, and of anything without a graph: it would take as much memory as the head."""
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(131, 4)
    labels = torch.arange(8)
    loss = linear_cross_entropy(hidden, weight, labels)
    kept = [x for x in loss.grad_fn.saved_tensors if x is not None]  # pyright: ignore
    assert [tuple(x.shape) for x in kept] == [(8, 4)]
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight.requires_grad_(True), labels).grad_fn is None
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, weight, labels)
    assert "aten::mm" in {event.key for event in profile.key_averages()}
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 1


class InThreads:
    """Some of the words, in one of several threads: what `join` gives to all is what each gave."""

    def __init__(self, number: int, first: int, given: list[Tensor], met: Barrier) -> None:
        self.number, self.first, self.given, self.met = number, first, given, met

    def join(self, sums_2S: Tensor) -> Tensor:
        self.given[self.number] = sums_2S
        self.met.wait()
        each = torch.stack(self.given)
        self.met.wait()
        return torch.stack((each[:, 0].logsumexp(0), each[:, 1].sum(0)))


@pytest.mark.parametrize("form", ["eager", *(["native"] if native_library() is None else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_vocabulary_are_one(form: Form, dtype: torch.dtype) -> None:
    """House rule, over several chunks and three parts: the loss is that of all words, the gradients of hidden
    add up, and no word that stands in for others has another gradient than its own.
    """
    if form == "native" and dtype != torch.bfloat16:
        return
    rows, parts, vocabulary = 200, 3, 3 * 70_000
    hidden, weight, labels = drawn(rows, 16, vocabulary, dtype)
    labels[0], labels[1], labels[2] = 0, 70_000, vocabulary - 1

    def part(number: int, given: list[Tensor], met: Barrier) -> list[Tensor]:
        words = InThreads(number, number * 70_000, given, met)
        rows_of = weight[words.first : words.first + 70_000]
        h, w = (x.to(dtype).requires_grad_(True) for x in (hidden, rows_of))
        loss = linear_cross_entropy(h, w, labels, form=form, part=words)
        return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

    def whole(kind: torch.dtype) -> list[Tensor]:
        h, w = (x.to(kind).requires_grad_(True) for x in (hidden, weight))
        loss = linear_cross_entropy_reference(h, w, labels)
        return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

    given, met = [torch.empty(0)] * parts, Barrier(parts)
    with ThreadPoolExecutor(parts) as threads:
        found = list(threads.map(lambda number: part(number, given, met), range(parts)))
    assert all(torch.equal(loss, found[0][0]) for loss, _, _ in found)
    mine = [
        found[0][0],
        torch.stack([h.double() for _, h, _ in found]).sum(0),
        torch.cat([w for _, _, w in found]),
    ]
    for ours, plain, exact in zip(mine, whole(dtype), whole(torch.float64), strict=True):
        ulp = torch.finfo(dtype).eps * exact.abs().max().item()
        error = (ours.double() - exact).abs().max().item()
        assert error <= 2 * (plain.double() - exact).abs().max().item() + ulp
