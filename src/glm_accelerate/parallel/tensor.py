"""A model divided over the tensor axis. Of each pair of products a rank has some outputs of the first and the
inputs of the second that these are; between pairs, with gradients, it has a part of the tokens.

gather -> query heads, gate and up by outputs -> attention, swiglu -> o_proj, down_proj by inputs -> sum
words of the embedding -> sum; words of the head -> a softmax of these -> two numbers a row are exchanged
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding

from glm_accelerate.kernels.quantized import BLOCK
from glm_accelerate.models.adapt import Prefix
from glm_accelerate.models.decoder import Block, Decoder, RMSNorm
from glm_accelerate.models.linear import Linear, PackedWeight
from glm_accelerate.parallel.exchange import exchanged
from glm_accelerate.parallel.place import TENSOR, Place
from glm_accelerate.parallel.table import Axis, Cut
from glm_accelerate.runtime.seed import seed_all, step_seed

Span = tuple[int, int]
_Way = Callable[[Tensor, Place], Tensor]  # what ranks make of a tensor together


def cut_model(model: Decoder, place: Place) -> dict[str, Cut]:
    """In place, whether its weights are there or yet to be read. How its parameters lie then."""
    sizes = model.sizes
    part = sizes.part(place.count(*TENSOR))
    cutter = _Cutter(_Tokens(place, part.spread > 1), place)
    assert part.kv_heads * place.count("tensor") == sizes.kv_heads, (
        "ranks that share a key head are not next to each other"
    )
    for number, block in enumerate(model.layers):
        assert isinstance(block, Block)
        name, attention = f"layers.{number}.self_attn", block.self_attn
        query, key = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        queries, keys = place.share(query, *TENSOR), place.share(key, "tensor")
        if sizes.fused_qkv:
            spans = (queries, _after(query, keys), _after(query + key, keys))
            cutter.outputs(f"{name}.query_key_value", attention.query_key_value, query + 2 * key, spans)
        else:
            cutter.outputs(f"{name}.q_proj", attention.q_proj, query, [queries])
            cutter.outputs(f"{name}.k_proj", attention.k_proj, key, [keys], ("tensor",), ("query",))
            cutter.outputs(f"{name}.v_proj", attention.v_proj, key, [keys], ("tensor",), ("query",))
        cutter.inputs(f"{name}.o_proj", attention.o_proj, queries)
        attention.groups = part.heads // part.kv_heads
        name, width = f"layers.{number}.mlp", sizes.mlp_width
        rows = place.share(width, *TENSOR)
        cutter.outputs(f"{name}.gate_up_proj", block.mlp.gate_up_proj, 2 * width, [rows, _after(width, rows)])
        cutter.inputs(f"{name}.down_proj", block.mlp.down_proj, rows)
        for pair in (attention, block.mlp):
            pair.register_forward_pre_hook(cutter.copy_input)
            pair.register_forward_hook(cutter.sum_output)
    if part.spread > 1:  # a norm has part of the tokens
        norms = [name for name, module in model.named_modules() if isinstance(module, RMSNorm)]
        cutter.cuts.update({f"{name}.weight": Cut(partial=TENSOR) for name in norms})
    if isinstance(model.prefix, Prefix):
        model.prefix.heads = slice(*place.share(sizes.kv_heads, "tensor"))
        cutter.cuts["prefix.weight"] = Cut(partial=TENSOR)
    if part.vocabulary < sizes.vocabulary:
        _cut_words(model, cutter)
    model.sizes = replace(part, vocabulary=sizes.vocabulary)
    return cutter.cuts


def _cut_words(model: Decoder, cutter: "_Cutter") -> None:
    """Rows of the embedding and of the head, which may be the same."""
    whole, tied = len(model.embed), model.head.weight is model.embed
    span = cutter.place.share(whole, *TENSOR)
    cutter.keep("embed", model, Cut(0, whole, (span,), TENSOR))
    if tied:
        model.head.weight = model.embed
    else:
        cutter.keep("head.weight", model.head, Cut(0, whole, (span,), TENSOR))
    model.words = _Words(span[0], span[1], cutter.tokens)
    model.head.register_forward_hook(cutter.gather_words)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What ranks that share every product exchange of a pass's tokens."""

    place: Place
    parted: bool  # with gradients, a rank has a part of them between products

    def gather(self, x_BTH: Tensor) -> Any:
        """Of all ranks, which then multiply it by different weights: the gradients of all are summed."""
        ahead, back = (_all_tokens, _own_tokens) if self._parted_now() else (_same, _total)
        return _Exchange.apply(x_BTH, self.place, ahead, back)

    def sum(self, x_BTH: Tensor) -> Any:
        """Of what each rank has made of all tokens."""
        ahead, back = (_own_tokens, _all_tokens) if self._parted_now() else (_total, _same)
        return _Exchange.apply(x_BTH, self.place, ahead, back)

    def _parted_now(self) -> bool:
        return self.parted and torch.is_grad_enabled()


@dataclass(slots=True)
class _Words:
    """The words of this rank."""

    first: int
    stop: int
    tokens: "_Tokens"

    def embed(self, tokens_BT: Tensor, weight_VH: Tensor) -> Any:
        here_BT = (tokens_BT >= self.first) & (tokens_BT < self.stop)
        x_BTH = embedding((tokens_BT - self.first).where(here_BT, 0), weight_VH)
        return self.tokens.sum(x_BTH * here_BT[..., None])

    def enter(self, x_BTH: Tensor) -> Tensor:
        return self.tokens.gather(x_BTH)

    def join(self, sums_2S: Tensor) -> Tensor:
        of_ranks = _of_ranks(sums_2S, self.tokens.place)
        return torch.stack((of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)))


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts linear layers, and remembers how."""

    tokens: _Tokens
    place: Place
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])

    def copy_input(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the first of two products."""
        return self.tokens.gather(args[0]), *args[1:]

    def sum_output(self, _: nn.Module, __: object, out: Tensor) -> Any:
        """After the second."""
        return self.tokens.sum(out)

    def gather_words(self, _: nn.Module, __: object, logits: Tensor) -> Tensor:
        """After the head, for generation and evaluation, whose rows are few."""
        return torch.cat(tuple(_of_ranks(logits, self.place)), -1)

    def outputs(
        self,
        name: str,
        layer: nn.Module,
        whole: int,
        spans: Sequence[Span],
        divided: Axis = TENSOR,
        partial: Axis = (),
    ) -> None:
        """All ranks have its inputs, so each has a part of the gradient of what reads them."""
        assert isinstance(layer, Linear)
        cut = Cut(0, whole, tuple(spans), divided, partial)
        for leaf in ("weight", "bias", "lora_B"):
            self.keep(f"{name}.{leaf}", layer, cut)
        if layer.packed is not None:
            for leaf in ("codes", "scales", "levels"):
                self.keep(f"{name}.packed.{leaf}", layer.packed, cut)
        self.cuts[f"{name}.lora_A"] = Cut(partial=TENSOR)

    def inputs(self, name: str, layer: nn.Module, span: Span) -> None:
        """All ranks make a part of each of its outputs."""
        assert isinstance(layer, Linear)
        assert layer.bias is None, f"{name} would add its bias on every rank"
        whole = layer.inputs
        for leaf in ("weight", "lora_A"):
            self.keep(f"{name}.{leaf}", layer, Cut(1, whole, (span,), TENSOR))
        if layer.packed is not None:
            self._columns(f"{name}.packed", layer.packed, span)
        if layer.adapter is not None and layer.adapter.dropout:
            _drop_apart(layer, 1 + self.place.index(*TENSOR))
        self.cuts[f"{name}.lora_B"] = Cut(partial=TENSOR)

    def _columns(self, name: str, packed: PackedWeight, span: Span) -> None:
        """Of a packed weight: nf4 has two numbers in a byte, and a level for each block of a row."""
        for leaf, numbers in (("codes", 2 if packed.kind == "nf4" else 1), ("levels", BLOCK)):
            assert packed.kind != "nf4" or span[0] % BLOCK == span[1] % BLOCK == 0, (
                f"{name} has parts of blocks"
            )
            columns = span[0] // numbers, span[1] // numbers
            width = 0 if (part := getattr(packed, leaf)) is None else part.shape[1]
            self.keep(f"{name}.{leaf}", packed, Cut(1, width, (columns,), TENSOR))
        packed.inputs = span[1] - span[0]

    def keep(self, name: str, owner: nn.Module, cut: Cut) -> None:
        """Of the owner's parameter, if there is one, what is cut for this rank."""
        leaf = name.rpartition(".")[2]
        whole = dict(owner.named_parameters(recurse=False)).get(leaf)
        if whole is None:
            return
        parts = [whole.detach().narrow(cut.dim, start, stop - start) for start, stop in cut.intervals]
        setattr(owner, leaf, nn.Parameter(torch.cat(parts, cut.dim), whole.requires_grad))
        self.cuts[name] = cut


def _drop_apart(layer: Linear, number: int) -> None:
    """Ranks have other inputs of this layer: each drops by numbers of its own, and all draw alike again after
    it.
    """
    drawn: list[int] = []

    def before(*_: object) -> None:
        if layer.training:
            drawn.append(int(torch.randint(1 << 62, ())))
            seed_all(step_seed(drawn[-1], number))

    def after(*_: object) -> None:
        if drawn:
            seed_all(step_seed(drawn.pop(), 0))

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _of_ranks(own: Tensor, place: Place) -> Tensor:
    """What each rank has, in their order."""
    of_ranks = own.new_empty(place.count(*TENSOR), *own.shape)
    dist.all_gather(list(of_ranks), own.contiguous(), group=place.group(*TENSOR))
    return of_ranks


def _all_tokens(part_BTH: Tensor, place: Place) -> Tensor:
    """The parts of all ranks, one after the other."""
    return _of_ranks(part_BTH, place).transpose(0, 1).flatten(1, 2)


def _own_tokens(whole_BTH: Tensor, place: Place) -> Tensor:
    """This rank's part of the sum over ranks."""
    of_ranks = whole_BTH.unflatten(1, (place.count(*TENSOR), -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(of_ranks[0])
    dist.reduce_scatter(own, list(of_ranks), group=place.group(*TENSOR))
    return own


def _same(x_BTH: Tensor, _: Place) -> Tensor:
    return x_BTH.view_as(x_BTH)


def _total(x_BTH: Tensor, place: Place) -> Tensor:
    """The sum over ranks."""
    total = x_BTH.clone(memory_format=torch.contiguous_format)
    place.sum_(total, *TENSOR)
    return total


class _Exchange(torch.autograd.Function):
    """One exchange between ranks forward, and the one that is its gradient backward."""

    @staticmethod
    def forward(ctx: Any, x_BTH: Tensor, place: Place, ahead: _Way, back: _Way) -> Tensor:
        ctx.place, ctx.back = place, back
        return ahead(x_BTH, place) if ahead is _same else exchanged(lambda x: ahead(x, place), x_BTH)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.place), None, None, None


def _after(offset: int, span: Span) -> Span:
    return offset + span[0], offset + span[1]
