"""Causal attention over packed rows in one launch, on CUDA: torch's varlen flash attention, the package
flash-attn, or FlexAttention with a mask of blocks. Query heads share keys and values that are not repeated.

Letters: S tokens of all rows, N query heads, K key/value heads, D head width, P prefix tokens, Q blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.choose import FLASH, FLEX, VARLEN
from glm_accelerate.kernels.compiled import keep_by_machine
from glm_accelerate.runtime.device import send

BLOCK = 128  # tokens of a block of FlexAttention's mask


@dataclass(frozen=True)
class Documents:
    """Documents side by side, in the form that kernels need: made once a batch, shared by all layers."""

    lengths: tuple[int, ...]
    starts: Tensor  # int32, on the device: 0, and where each document ends
    keys: tuple[int, ...]  # that each sees: its own are the last of them
    key_starts: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> "Documents":
        starts = send(_starts(lengths), device)
        if keys is None or tuple(keys) == tuple(lengths):
            return Documents(tuple(lengths), starts, tuple(lengths), starts)
        return Documents(tuple(lengths), starts, tuple(keys), send(_starts(keys), device))

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def most_keys(self) -> int:
        return max(self.keys)

    @cached_property
    def block_mask(self) -> Any:
        """FlexAttention's view of the documents, made from their lengths: a dense mask never exists."""
        return _block_mask(self.lengths, self.starts.device)

    def starts_behind(self, prefix: int) -> Tensor:
        """Where each document's keys begin if `prefix` keys stand before every document."""
        number = torch.arange(len(self.starts), dtype=torch.int32, device=self.starts.device)
        return self.key_starts + prefix * number


def varlen_attention(
    path: str,
    q_SND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    documents: Documents,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns out_SND. `prefix` is (keys, values) of shape KPD that stand before every document."""
    if path == FLEX:
        assert prefix is None, "FlexAttention's mask knows no prefix"
        assert documents.keys == documents.lengths, "FlexAttention's mask knows no pieces"
        return _flex(q_SND, k_SKD, v_SKD, documents)
    starts, longest = documents.key_starts, documents.most_keys
    if prefix is not None:
        k_SKD, v_SKD = (_behind(x, p, documents) for x, p in zip((k_SKD, v_SKD), prefix, strict=True))
        starts, longest = documents.starts_behind(prefix[0].shape[1]), longest + prefix[0].shape[1]
    # Both kernels align "causal" at the end of keys that outnumber the queries: a prefix is seen by all, and
    # so are the keys before a piece.
    lengths = (documents.starts, starts, documents.longest, longest)
    if path == FLASH:
        return _flash_attn()(
            q_SND,
            k_SKD,
            v_SKD,
            *lengths,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    assert path == VARLEN, path
    return _torch_varlen()(q_SND, k_SKD, v_SKD, *lengths)


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@cache
def _torch_varlen() -> Callable[..., Tensor]:
    """Causal attention for any heads: torch 2.11 takes shared keys as they are, later ones need an option."""
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = True

    def call(*arguments: Any) -> Tensor:
        out: Any = varlen_attn(*arguments, **options)
        return out

    return call


@cache
def _flash_attn() -> Callable[..., Tensor]:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func


def _behind(x_SKD: Tensor, prefix_KPD: Tensor, documents: Documents) -> Tensor:
    """x with a copy of the prefix before every document: its gradient is summed in its own dtype."""
    before_PKD = prefix_KPD.transpose(0, 1)
    copies = before_PKD.expand(len(documents.lengths), *before_PKD.shape).to(x_SKD.dtype).unbind()
    parts = x_SKD.split(documents.keys)
    return torch.cat([piece for pair in zip(copies, parts, strict=True) for piece in pair])


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    keep_by_machine()
    return torch.compile(flex_attention)


def _flex(q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: Documents) -> Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in (q_SND, k_SKD, v_SKD))
    out_1NSD = _compiled_flex()(*heads_first, block_mask=documents.block_mask, enable_gqa=True)
    return out_1NSD[0].transpose(0, 1)


def _block_mask(lengths: Sequence[int], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    start_S = torch.repeat_interleave(torch.tensor([0, *accumulate(lengths)][:-1]), torch.tensor(lengths))
    S = len(start_S)
    first_Q = torch.arange(0, S, BLOCK)
    end_Q = first_Q + BLOCK
    number_Q = torch.arange(len(first_Q))
    past_QQ = number_Q < number_Q[:, None]
    seen_QQ = (number_Q >= start_S[first_Q][:, None] // BLOCK) & (past_QQ | (number_Q == number_Q[:, None]))
    # All of one document, all before, and the queries' block is filled: no pair needs a look.
    whole_QQ = past_QQ & (first_Q >= start_S[end_Q.clamp(max=S) - 1][:, None]) & (end_Q <= S)[:, None]
    start_S = start_S.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= start_S[query])

    counted = (part for mask in (seen_QQ & ~whole_QQ, whole_QQ) for part in _counted(mask, device))
    return BlockMask.from_kv_blocks(*counted, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(S, S))


def _counted(mask_QQ: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks each block of queries sees, and their numbers in order, then the others'."""
    order_QQ = (~mask_QQ).to(torch.int8).argsort(dim=1, stable=True)
    counts_Q = mask_QQ.sum(1)
    return counts_Q.to(device, torch.int32)[None, None], order_QQ.to(device, torch.int32)[None, None]
