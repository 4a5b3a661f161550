"""Grouped-query attention with partial rotary positions.

Head counts come from the tensors' shapes, so a sharded layer needs no change here.
Letters: B rows, T tokens, H width, N query heads, K key/value heads, D head width.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from glm_accelerate.kernels.attention import attention, rotary_attention
from glm_accelerate.kernels.choose import BY_DOCUMENT, Form, attention_path, facts_of
from glm_accelerate.kernels.rope import rope
from glm_accelerate.kernels.varlen_attention import varlen_attention
from glm_accelerate.models.cache import KeyValueCache
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import projection
from glm_accelerate.models.sizes import Sizes

Prefix = tuple[Tensor, Tensor]  # keys and values before every document


class Sharing(Protocol):
    """Processes that share documents too long for one."""

    def gather(self, k_BTKD: Tensor, v_BTKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Keys and values that each document of the layout sees, one after the other: k_SKD and v_SKD."""
        ...


class Attention(nn.Module):
    """Queries, keys and values from one matrix where the checkpoint has one (ChatGLM), else from three."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        D, bias = sizes.head_width, sizes.qkv_bias
        query, key = sizes.heads * D, sizes.kv_heads * D
        name = f"layers.{layer}.self_attn"
        if sizes.fused_qkv:
            self.query_key_value = projection(
                sizes, f"{name}.query_key_value", sizes.width, query + 2 * key, bias
            )
        else:
            self.q_proj = projection(sizes, f"{name}.q_proj", sizes.width, query, bias)
            self.k_proj = projection(sizes, f"{name}.k_proj", sizes.width, key, bias)
            self.v_proj = projection(sizes, f"{name}.v_proj", sizes.width, key, bias)
        self.o_proj = projection(sizes, f"{name}.o_proj", query, sizes.width)
        self.fused, self.head_width, self.layer = sizes.fused_qkv, D, layer
        self.groups = sizes.heads // sizes.kv_heads
        self.form: Form = "eager"
        self.sharing: Sharing | None = None  # None: all documents are whole

    def share(self, first: "Attention") -> None:
        """Use the queries' and keys' projections of an earlier layer."""
        self.q_proj, self.k_proj = first.q_proj, first.k_proj

    def forward(
        self,
        x_BTH: Tensor,
        layout: Layout,
        table: Tensor,
        prefix: Prefix | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_width)) for part in self._project(x_BTH))
        if self.form == "native" and prefix is None and (cache is None or not cache.filled):
            if cache is not None:
                cache.fill(self.layer, rope(k, table), v)
            turns = torch.view_as_real(table).flatten(0, 2)
            if layout.pieces:  # keys come from elsewhere, turned: nothing is left to be turned
                q, turns = rope(q, table), turns.new_empty(len(turns), 0, 2)
                k_SKD, v_SKD = self._gather(rope(k, table), v, layout)
            else:
                k_SKD, v_SKD = k.flatten(0, 1), v.flatten(0, 1)
            out = rotary_attention(q.flatten(0, 1), k_SKD, v_SKD, turns, layout.lengths, layout.keys)
            return self.o_proj(out.view(*x_BTH.shape[:-1], -1))
        form: Form = "triton" if self.form == "triton" else "eager"  # other forms have no rotary operator
        q_BTND, k_BTKD = rope(q, table, form), rope(k, table, form)
        if cache is not None and cache.filled:
            out = cache.attend(self.layer, q_BTND, k_BTKD, v)
        else:
            if cache is not None:
                cache.fill(self.layer, k_BTKD, v, prefix)
            if layout.pieces:
                k_BTKD, v = (x[None] for x in self._gather(k_BTKD, v, layout))
            out = _attend(q_BTND, k_BTKD, v, layout, prefix)
        return self.o_proj(out.flatten(-2).to(x_BTH.dtype))

    def _gather(self, k_BTKD: Tensor, v_BTKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        assert self.sharing is not None, "a piece of a document, and nobody has the rest"
        return self.sharing.gather(k_BTKD, v_BTKD, layout)

    def _project(self, x_BTH: Tensor) -> tuple[Tensor, ...]:
        if not self.fused:
            return self.q_proj(x_BTH), self.k_proj(x_BTH), self.v_proj(x_BTH)
        qkv = self.query_key_value(x_BTH)
        key = qkv.shape[-1] // (self.groups + 2)  # [q | k | v], with `groups` query heads a key head
        return qkv.split((qkv.shape[-1] - 2 * key, key, key), dim=-1)


def _attend(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, layout: Layout, prefix: Prefix | None) -> Tensor:
    """By the path that `attention_path` names."""
    facts, training = facts_of(q_BTND.device), torch.is_grad_enabled()
    path, _ = attention_path(
        facts, q_BTND.dtype, q_BTND.shape[-1], training, prefix is not None, bool(layout.pieces)
    )
    if path == BY_DOCUMENT:
        lengths = None if layout.whole_rows else layout.lengths
        return attention(q_BTND, k_BTKD, v_BTKD, lengths, prefix, layout.keys if layout.pieces else None)
    q_SND, k_SKD, v_SKD = (x.flatten(0, 1) for x in (q_BTND, k_BTKD, v_BTKD))
    return varlen_attention(path, q_SND, k_SKD, v_SKD, layout.packed, prefix).view_as(q_BTND)
