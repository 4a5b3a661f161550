"""The operators in C++, where this machine can build and run them: against their definitions in float64."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import rms_norm, rope, swiglu
from glm_accelerate.kernels.attention import attention_reference, rotary_attention
from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.linear import linear, lora_linear
from glm_accelerate.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from glm_accelerate.kernels.native import build
from tests.unit.kernels.test_attention import by_definition

here = pytest.mark.skipif(build.lacking() is not None, reason=f"no native operators: {build.lacking()}")


@pytest.fixture(autouse=True)
def _threads() -> object:
    """Two, so that rows are really shared out; and the library is there."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert build.lacking() is not None or build.load() is None
    yield None
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def judge(mine: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward and every gradient: at most twice plain PyTorch's error in bfloat16, and a rounding."""
    slope = torch.randn(
        plain(*inputs).shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    ).bfloat16()

    def results(work: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = work(*given)
        return [out.detach(), *torch.autograd.grad(out, given, slope.to(dtype))]

    exact = results(plain, torch.float64)
    for own, theirs, true in zip(
        results(mine, torch.bfloat16), results(plain, torch.bfloat16), exact, strict=True
    ):
        scale = true.abs().max()
        allowed = 2 * (theirs - true).abs().max() + torch.finfo(torch.bfloat16).eps * scale
        assert (own - true).abs().max() <= allowed


@here
@pytest.mark.parametrize(
    ("heads", "keys", "width", "turning"), [(6, 3, 16, 4), (5, 1, 32, 16), (4, 4, 64, 32), (32, 2, 128, 32)]
)
@pytest.mark.parametrize("lengths", [(1, 30, 5, 129), (64, 65, 63), (700,)])
def test_attention(lengths: tuple[int, ...], heads: int, keys: int, width: int, turning: int) -> None:
    """Documents of one token, of part of a block, of several blocks and of several spans."""
    S = sum(lengths)
    table = rope.rope_table(torch.cat([torch.arange(length) for length in lengths])[None], 2 * turning, 1e4)
    turns = torch.view_as_real(table)[0, :, 0].contiguous()

    def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rotary_attention(q, k, v, turns, lengths).view_as(q)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rope.rope_reference(x[None], table) for x in (q, k))
        return attention_reference(q, k, v[None], lengths)[0]

    shapes = ((S, heads, width), (S, keys, width), (S, keys, width))
    judge(mine, plain, [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)])


@here
@pytest.mark.parametrize(("lengths", "keys"), [((3, 1, 90), (5, 700, 90)), ((300, 64, 20), (613, 65, 20))])
def test_attention_of_pieces(lengths: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """Keys of other ranks stand before a document's own, turned already."""

    def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rotary_attention(q, k, v, torch.empty(len(q), 0, 2), lengths, keys).view_as(q)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_definition(q, k, v, lengths, keys)

    shapes = ((sum(lengths), 6, 64), (sum(keys), 2, 64), (sum(keys), 2, 64))
    judge(mine, plain, [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)])


@here
def test_documents_do_not_see_each_other_and_threads_change_nothing() -> None:
    lengths = (70, 200, 33)
    table = rope.rope_table(torch.cat([torch.arange(length) for length in lengths])[None], 32, 1e4)
    turns = torch.view_as_real(table)[0, :, 0].contiguous()
    packed = normal(
        sum(lengths), 8, 64
    )  # queries, keys and values from one tensor, as a fused layer has them

    def go(x: Tensor, turns: Tensor, lengths: Sequence[int]) -> Tensor:
        return rotary_attention(x[:, :4], x[:, 4:6], x[:, 6:], turns, lengths)

    together = go(packed, turns, lengths)
    bounds = list(accumulate(lengths, initial=0))
    for start, end in pairwise(bounds):
        assert torch.equal(go(packed[start:end], turns[start:end], [end - start]), together[start:end])
    torch.set_num_threads(1)
    assert torch.equal(go(packed, turns, lengths), together)


@here
def test_what_is_not_a_number_stays_seen() -> None:
    """A run that has diverged must not look healthy because a weight of nothing came out as 0."""
    q, k, v = normal(40, 4, 64), normal(40, 2, 64, seed=1), normal(40, 2, 64, seed=2)
    turns = torch.view_as_real(rope.rope_table(torch.arange(40)[None], 32, 1e4))[0, :, 0].contiguous()
    for spoilt in (q, k, v):
        broken = spoilt.clone()
        broken[7, 0, 3] = float("nan")
        out = rotary_attention(*(broken if x is spoilt else x for x in (q, k, v)), turns, (40,))
        assert out[7].isnan().any()


@here
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 24, 40), (383, 48, 33), (1000, 65, 130)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    given = [normal(1, rows, inputs), normal(outputs, inputs, seed=1)]
    given += [normal(outputs, seed=2)] if bias else []

    def mine(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear(x, w, b, native=True)

    judge(mine, lambda x, w, b=None: torch.nn.functional.linear(x, w, b), given)


@here
def test_a_product_without_rows() -> None:
    """The head of a rank whose share of an evaluation has no target."""
    x, weight = normal(0, 48).requires_grad_(True), normal(16, 48, seed=1).requires_grad_(True)
    out = linear(x, weight, None, native=True)
    out.sum().backward()
    assert out.shape == (0, 16)
    assert x.grad is not None
    assert x.grad.shape == (0, 48)
    assert weight.grad is not None
    assert not weight.grad.any()


@here
def test_gradients_of_master_weights_are_float32() -> None:
    weight = normal(40, 24).float().requires_grad_()
    bias = torch.zeros(40, requires_grad=True)
    linear(normal(2, 500, 24), weight, bias, native=True).sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@here
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (33, 61), (500, 128)])
def test_swiglu(rows: int, width: int) -> None:
    """Whole and broken groups of sixteen; large numbers, where the gate is shut or open, too."""
    given = [normal(rows, 2 * width) * 8]
    judge(lambda x: swiglu.swiglu(x, "native"), swiglu.swiglu_reference, given)
    far = torch.tensor([[-3e38, -200.0, -0.0, 200.0] * 4 + [1.0] * 16]).bfloat16()
    assert torch.equal(swiglu.swiglu(far, "native"), swiglu.swiglu_reference(far))
    assert swiglu.swiglu(far.fill_(float("nan")), "native").isnan().all()


@here
@pytest.mark.parametrize("rows", [1, 37, 500])
def test_norms_and_the_sums_around_them(rows: int) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm.rms_norm_reference(x, weight, 1e-5)

    x, branch, one, two = normal(1, rows, 48), normal(1, rows, 48, seed=1) * 3, normal(48), normal(48, seed=2)
    judge(lambda x, w: rms_norm.rms_norm(x, w, 1e-5, "native"), norm, [x, one])
    judge(
        lambda x, b, w: rms_norm.add_norm(x, b, w, 1e-5, "native"),
        lambda x, b, w: x + norm(b, w),
        [x, branch, one],
    )
    judge(
        lambda x, b, w: torch.cat(rms_norm.sum_norm(x, b, w, 1e-5, "native")),
        lambda x, b, w: torch.cat((x + b, norm(x + b, w))),
        [x, branch, one],
    )

    def plain(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> Tensor:
        y = x + norm(branch, after)
        return torch.cat((y, norm(y, before)))

    def mine(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> Tensor:
        return torch.cat(rms_norm.sandwich(x, branch, after, before, 1e-5, "native"))

    judge(mine, plain, [x, branch, one, two])


@here
def test_frozen_norms_get_no_gradient() -> None:
    x, branch, weight = normal(1, 5, 32), normal(1, 5, 32, seed=1).requires_grad_(), normal(32, seed=2)
    y, out = rms_norm.sandwich(x, branch, weight, weight, 1e-5, "native")
    out.sum().backward()  # nothing flows into y but through out
    assert branch.grad is not None
    assert weight.grad is None
    assert y.requires_grad


@here
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 17), (300, 131), (130, 4096)])
def test_cross_entropy(rows: int, vocabulary: int) -> None:
    """Labels at both ends of the vocabulary; a frozen head; what is not a number is seen."""
    labels = torch.arange(rows) * (vocabulary - 1) % vocabulary
    hidden, weight = normal(rows, 48), normal(vocabulary, 48, seed=1)

    def results(form: Form | None, dtype: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        if form is None:
            loss = linear_cross_entropy_reference(*given, labels)
        else:
            loss = linear_cross_entropy(*given, labels, form)
        return [loss.detach(), *torch.autograd.grad(loss * 0.7, given)]

    exact, plain = results(None, torch.float64), results(None, torch.bfloat16)
    for mine, theirs, true in zip(results("native", torch.bfloat16), plain, exact, strict=True):
        allowed = 2 * (theirs - true).abs().max() + torch.finfo(torch.bfloat16).eps * true.abs().max()
        assert (mine - true).abs().max() <= allowed
    frozen = hidden.detach().clone().requires_grad_()
    linear_cross_entropy(frozen, weight, labels, "native").backward()
    assert frozen.grad is not None
    spoilt = hidden.detach().clone()
    spoilt[0, 0] = float("nan")
    assert linear_cross_entropy(spoilt, weight, labels, "native").isnan()


def dropped(rows: int, inputs: int, share: float, seed: int) -> Tensor:
    """The mask, read off by sending ones through the identity."""
    torch.manual_seed(seed)
    ones, none = torch.ones(rows, inputs).bfloat16(), torch.zeros(inputs, inputs).bfloat16()
    eye = torch.eye(inputs)
    return lora_linear(ones, none, None, eye, eye, scale=1 - share, dropout=share, native=True)


@here
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("rows", "rank"), [(3, 1), (777, 5), (640, 8)])
def test_lora(rows: int, rank: int, share: float) -> None:
    """With the mask that was really drawn."""
    inputs, outputs = 48, 72
    weight, A, B = normal(outputs, inputs), normal(rank, inputs, seed=1), normal(outputs, rank, seed=2)
    mask = dropped(rows, inputs, share, seed=3)

    def mine(x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        torch.manual_seed(3)
        wide = A.float(), B.float()
        return lora_linear(x, weight, None, *wide, scale=0.7, dropout=share, native=True)

    def plain(x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        seen = x * mask.to(x.dtype) / (1 - share)
        return x @ weight.to(x.dtype).T + 0.7 * (seen @ A.T) @ B.T

    judge(mine, plain, [normal(rows, inputs, seed=4), A, B])


@here
def test_masks() -> None:
    """As many zeros as asked for in every row and column; neighbours and other seeds tell nothing of them."""
    rows, inputs, share = 1200, 512, 0.1
    mask = dropped(rows, inputs, share, seed=1)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(dropped(rows, inputs, share, seed=1), mask)
    other = dropped(rows, inputs, share, seed=2)
    zeros = 1 - mask.double()
    spread = share * (1 - share)
    assert abs(zeros.mean() - share) < 5 * (spread / zeros.numel()) ** 0.5
    for means, count in ((zeros.mean(1), inputs), (zeros.mean(0), rows)):
        assert (means - share).abs().max() < 5.5 * (spread / count) ** 0.5
        assert 0.8 < means.var() / (spread / count) < 1.2
    centred = zeros - share
    for one, two in (
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred[:, 16:], centred[:, :-16]),
        (centred, 1 - other.double() - share),
    ):
        assert abs((one * two).mean()) < 5 * spread / one.numel() ** 0.5


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.lacking() in (
        "no C++ compiler (no-such-compiler)",
        "no bfloat16 products (AVX-512 BF16 or AMX) in this processor",
    )


@here
def test_a_compiler_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "cache"))
    build.load.cache_clear()
    request.addfinalizer(build.load.cache_clear)
    assert build.load() == f"{broken} failed: error: no such thing"
    assert list((tmp_path / "cache" / "native").iterdir()) == []


@pytest.mark.process
@here
def test_a_disk_that_executes_nothing_costs_speed_alone(tmp_path: Path, mount: Callable[..., Path]) -> None:
    """In a process of its own: one that could not map a file keeps it open."""
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "noexec,mode=700", "tmpfs")
    made = next(path for path in map(Path, torch.ops.loaded_libraries) if path.parent.name == "native")
    (disk / "native").mkdir(mode=0o700)
    shutil.copy(made, disk / "native" / made.name)
    script = "from glm_accelerate.kernels.native.build import load; print(load())"
    environment = {**os.environ, "GLM_ACCELERATE_CACHE": str(disk)}
    said = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert said.startswith(f"{disk}/native/{made.name} cannot be loaded (")


def test_a_library_that_others_could_have_written_is_never_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A processor by its file alone, and a compiler whose libraries no system loads."""
    cpuinfo, compiler, cache = tmp_path / "cpuinfo", tmp_path / "compiler", tmp_path / "cache" / "native"
    cpuinfo.write_text("flags : amx_bf16 amx_tile\n")
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr("glm_accelerate.runtime.host.CPUINFO", cpuinfo)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(cache.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    request.addfinalizer(build.load.cache_clear)

    def load() -> None:
        build.load.cache_clear()
        assert str(build.load()).startswith(f"{tmp_path}")
        assert "cannot be loaded" in str(build.load())

    load()
    (library,) = cache.iterdir()
    assert library.stat().st_mode & 0o777 == 0o700
    library.write_text("planted")
    library.chmod(0o766)
    load()
    assert library.read_text() == "made\n"  # compiled anew
    library.write_text("planted")
    cache.chmod(0o777)
    load()
    assert library.read_text() == "planted"
    assert (tmp_path / "home" / "glm-accelerate" / "native" / library.name).read_text() == "made\n"
