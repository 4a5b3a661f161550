"""Packed attention without a GPU: what each library is handed, the real signatures, and the mask of blocks.

The kernels themselves run in test_attention_cuda.py, where there is a GPU.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from glm_accelerate.kernels import varlen_attention as ours
from glm_accelerate.kernels.attention import attention, attention_reference
from glm_accelerate.kernels.choose import FLASH, FLEX, VARLEN
from glm_accelerate.models import attention as models_attention
from glm_accelerate.models.adapt import add_prefix
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model
from tests.unit.kernels.test_attention import by_definition

CPU = torch.device("cpu")
TILES = [(41,), (1, 30, 2, 8), (20, 21), (5, 0, 7)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(tokens: int, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(tokens, 6, width), normal(tokens, 2, width, seed=1), normal(tokens, 2, width, seed=2)


def by_contract(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int
) -> Tensor:
    """What both libraries document: head n reads key head n // groups, and the last query sees all keys."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert longest_q == int(starts_q.diff().max())
    assert longest_k == int(starts_k.diff().max())
    made: list[Tensor] = []
    for first, end, from_, to in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        keys, values = (x[from_:to].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("tnd,snd->nts", q[first:end], keys) * q.shape[-1] ** -0.5
        T, S = scores.shape[1:]
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        made.append(
            torch.einsum("nts,snd->tnd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
        )
    return torch.cat(made)


@pytest.fixture(params=[VARLEN, FLASH])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either library by its contract, with its own names for things."""

    def flash_attn_varlen_func(*given: Tensor, causal: bool, deterministic: bool) -> Tensor:
        assert causal
        assert not deterministic
        return by_contract(*given)  # pyright: ignore[reportArgumentType]

    def varlen_attn(*given: Tensor, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
        assert window_size == (-1, 0)
        assert enable_gqa
        return by_contract(*given)  # pyright: ignore[reportArgumentType]

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    ours._torch_varlen.cache_clear()
    ours._flash_attn.cache_clear()
    yield request.param
    ours._torch_varlen.cache_clear()
    ours._flash_attn.cache_clear()


@pytest.mark.parametrize("tiles", TILES)
def test_documents_never_see_each_other(path: str, tiles: tuple[int, ...]) -> None:
    q, k, v = packed(sum(tiles))
    out = ours.varlen_attention(path, q, k, v, ours.Documents.of(tiles, CPU))
    assert torch.allclose(out[None], attention_reference(q[None], k[None], v[None], tiles))


def test_the_keys_of_other_ranks_stand_before_a_piece(path: str) -> None:
    lengths, keys = (4, 1, 6), (9, 30, 6)
    (q, _, _), (_, k, v) = packed(11), packed(45)
    out = ours.varlen_attention(path, q, k, v, ours.Documents.of(lengths, CPU, keys))
    assert torch.allclose(out, by_definition(q, k, v, lengths, keys))


def test_a_prefix_stands_before_every_document(path: str) -> None:
    tiles = (4, 1, 6)
    q, k, v = packed(11)
    prefix = (normal(2, 3, 16, seed=3).requires_grad_(), normal(2, 3, 16, seed=4).requires_grad_())
    out = ours.varlen_attention(path, q, k, v, ours.Documents.of(tiles, CPU), prefix)
    expected = attention(q[None], k[None], v[None], tiles, prefix)
    assert torch.allclose(out[None], expected)
    for mine, theirs in zip(
        torch.autograd.grad(out.square().sum(), prefix),
        torch.autograd.grad(expected.square().sum(), prefix),
        strict=True,
    ):
        assert torch.allclose(mine, theirs)


def test_torch_still_takes_what_we_say() -> None:
    """Its op runs without data, forward and backward, through our own call: renamed arguments would fail."""
    q, k, v = (x.to("meta", torch.bfloat16).requires_grad_(True) for x in packed(41))
    documents = ours.Documents.of((1, 30, 2, 8), torch.device("meta"))
    out = ours.varlen_attention(VARLEN, q, k, v, documents)
    assert out.shape == q.shape
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
    named = list(inspect.signature(varlen.varlen_attn).parameters)
    assert named[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "(-1, 0) for causal" in (varlen.varlen_attn.__doc__ or "")


@pytest.mark.parametrize("tiles", [(1000,), (1, 300, 127, 128, 444), (128, 128), (7,), (200, 3, 1, 1, 500)])
def test_mask_of_blocks_is_what_torch_makes(tiles: tuple[int, ...]) -> None:
    """torch looks at every pair of tokens; ours is made from lengths."""
    S = sum(tiles)
    mine = ours.Documents.of(tiles, CPU).block_mask
    document = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles))
    theirs = create_block_mask(
        lambda b, h, q, k: (k <= q) & (document[q] == document[k]), None, None, S, S, device="cpu"
    )
    assert mine.shape == theirs.shape
    for counts, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        one, other = getattr(mine, counts), getattr(theirs, counts)
        assert torch.equal(one, other)
        valid = torch.arange(getattr(mine, indices).shape[-1]) < one[..., None]
        assert torch.equal(getattr(mine, indices)[valid], getattr(theirs, indices)[valid])


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("tiles", [(41,), (1, 300, 2, 108)])
def test_flex_attention_sees_documents(monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, ...]) -> None:
    """Not compiled: on a CPU it does not train. The same function with the same mask."""
    monkeypatch.setattr(ours, "_compiled_flex", lambda: flex_attention)
    q, k, v = packed(sum(tiles))
    with torch.no_grad():
        out = ours.varlen_attention(FLEX, q, k, v, ours.Documents.of(tiles, CPU))
    assert torch.allclose(out[None], attention_reference(q[None], k[None], v[None], tiles))


def test_a_layout_makes_its_documents_once() -> None:
    layout = Layout.of_documents([(3, 5), (8,)])
    assert layout.lengths == (3, 5, 8)
    assert not layout.whole_rows
    assert layout.packed is layout.packed
    assert layout.packed.starts.tolist() == [0, 3, 8, 16]
    assert layout.packed.starts_behind(2).tolist() == [0, 5, 12, 22]
    assert layout.packed.longest == 8


@pytest.mark.parametrize("prefix_tokens", [0, 3])
def test_a_whole_model(
    path: str, prefix_tokens: int, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of documents, each path against attention by document: hidden states and every gradient."""
    layout = Layout.of_documents([(7, 20, 1, 13), (30, 11)])
    tokens = torch.randint(0, 131, (2, 41), generator=torch.Generator().manual_seed(1))
    directory = make_model("glm4")

    def outcome() -> dict[str, Tensor]:
        model = load_model(directory, dtype=torch.float64).requires_grad_(True)
        if prefix_tokens:
            add_prefix(model, prefix_tokens, share=0.0)
        out = model.hidden(tokens, layout)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"out": out.detach(), **grads}

    by_document = outcome()
    monkeypatch.setattr(models_attention, "attention_path", lambda *facts: (path, "asked for"))
    for (name, mine), truth in zip(outcome().items(), by_document.values(), strict=True):
        allowed = 1e-5 if mine.dtype == torch.float32 else 1e-10  # a prefix is kept in float32
        assert (mine - truth).abs().max() <= allowed * truth.abs().max(), name
