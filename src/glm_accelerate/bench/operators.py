"""The operators of a built model as cases to be measured: what runs, its definition, and inputs.

The modules are the model's own, with whatever forms, packed weights or adapters they have.
Letters: S tokens, H width, X queries, keys and values side by side, T targets.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from glm_accelerate.kernels.choose import form_now
from glm_accelerate.kernels.linear import lora_linear_reference
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from glm_accelerate.kernels.rms_norm import rms_norm_reference, sandwich, sum_norm
from glm_accelerate.kernels.rope import rope_reference, rope_table
from glm_accelerate.kernels.swiglu import swiglu, swiglu_reference
from glm_accelerate.models.attention import Attention
from glm_accelerate.models.decoder import Block, Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import Linear
from glm_accelerate.models.sizes import Sizes

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One operator. `run` takes the inputs; `definition` takes them and the parameters that train, so that it
    can be computed in float64. Its other tensors are cast to the dtype of the first input.
    """

    name: str
    inputs: Outputs
    parameters: Outputs
    run: Callable[..., Outputs]
    definition: Callable[..., Outputs]
    module: nn.Module | None = None  # whose dropout is off while errors are measured
    read: int = 0  # bytes of weights


def cases(model: Decoder, lengths: Sequence[int], targets: int) -> Iterator[Case]:
    """All operators of the model's first block and its loss, for packed documents of these lengths: one at a
    time, because their inputs may be large.
    """
    block = cast("Block", model.layers[0])
    dtype, device = model.compute or model.embed.dtype, model.embed.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(dtype).requires_grad_()

    tokens, sizes = sum(lengths), model.sizes
    yield _norm(block, draw(1, tokens, sizes.width))
    yield _between(block, draw(1, tokens, sizes.width), draw(1, tokens, sizes.width))
    yield _swiglu(block, draw(1, tokens, 2 * sizes.mlp_width))
    columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_width
    yield _attention(block.self_attn, sizes, lengths, draw(1, tokens, columns))
    for name, part in block.named_modules():
        if isinstance(part, Linear):
            yield _linear(name, part, draw(1, tokens, part.inputs))
    yield _loss(model, draw(targets, sizes.width))


def _trained(*parameters: Tensor) -> Outputs:
    return tuple(parameter for parameter in parameters if parameter.requires_grad)


def _norm(block: Block, x_1SH: Tensor) -> Case:
    norm = block.input_layernorm

    def definition(x: Tensor, weight: Tensor = norm.weight) -> Outputs:
        return (rms_norm_reference(x, weight, norm.epsilon),)

    return Case("norm", (x_1SH,), _trained(norm.weight), lambda x: (norm(x),), definition)


def _between(block: Block, x_1SH: Tensor, branch_1SH: Tensor) -> Case:
    """The norms and the sum between the two branches of a block."""
    before, form = block.post_attention_layernorm, block.form
    after = block.post_self_attn_layernorm if block.sandwich else None
    epsilon = before.epsilon

    def run(x: Tensor, branch: Tensor) -> Outputs:
        if after is None:
            return sum_norm(x, branch, before.weight, epsilon, form)
        return sandwich(x, branch, after.weight, before.weight, epsilon, form)

    def definition(x: Tensor, branch: Tensor, *weights: Tensor) -> Outputs:
        first, *rest = weights or _present(after, before)
        y = x + (branch if after is None else rms_norm_reference(branch, first, epsilon))
        return y, rms_norm_reference(y, rest[0] if rest else first, epsilon)

    name = "sum and norm" if after is None else "norm, sum and norm"
    return Case(name, (x_1SH, branch_1SH), _trained(*_present(after, before)), run, definition)


def _present(after: nn.Module | None, before: nn.Module) -> Outputs:
    return tuple(cast("Tensor", norm.weight) for norm in (after, before) if norm is not None)


def _swiglu(block: Block, gate_up_1SF: Tensor) -> Case:
    form = form_now(block.mlp.form, training=True)
    return Case("swiglu", (gate_up_1SF,), (), lambda x: (swiglu(x, form),), lambda x: (swiglu_reference(x),))


def _attention(layer: Attention, sizes: Sizes, lengths: Sequence[int], qkv_1SX: Tensor) -> Case:
    """Rotary positions and attention: the model's own, with nothing before and behind it."""
    core = copy.copy(layer)
    object.__setattr__(core, "_modules", {"query_key_value": nn.Identity(), "o_proj": nn.Identity()})
    core.fused = True  # queries, keys and values come side by side
    layout = Layout.of_documents([tuple(lengths)], qkv_1SX.device)
    table = rope_table(layout.positions_BT, sizes.rope_width, sizes.rope_theta)

    def definition(qkv: Tensor) -> Outputs:
        heads, kv = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        q, k, v = (part.unflatten(-1, (-1, sizes.head_width)) for part in qkv.split((heads, kv, kv), dim=-1))
        q, k = rope_reference(q, table), rope_reference(k, table)
        k, v = (part.repeat_interleave(sizes.heads // sizes.kv_heads, dim=2) for part in (k, v))
        heads_first = [part.transpose(1, 2).split(list(lengths), dim=2) for part in (q, k, v)]
        parts = [
            scaled_dot_product_attention(*each, is_causal=True) for each in zip(*heads_first, strict=True)
        ]
        return (torch.cat(parts, dim=2).transpose(1, 2).flatten(2),)

    return Case(
        "rotary positions and attention",
        (qkv_1SX,),
        (),
        lambda qkv: (core(qkv, layout, table, None, None),),
        definition,
    )


def _linear(name: str, layer: Linear, x_1SI: Tensor) -> Case:
    packed, adapter = layer.packed, layer.adapter
    if adapter is not None:
        nn.init.normal_(layer.lora_B, std=0.02)  # it begins as zeros, behind which nothing would be seen
        trained = (layer.lora_A, layer.lora_B)
    else:
        trained = _trained(*(() if packed else (layer.weight,)))

    def definition(x: Tensor, *given: Tensor) -> Outputs:
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        frozen = packed.wide(x.dtype) if packed else layer.weight.to(x.dtype)
        if adapter is not None:
            return (lora_linear_reference(x, frozen, bias, *given, scale=adapter.scale),)
        return (linear(x, given[0].to(x.dtype) if given else frozen, bias),)

    kept = sum(parameter.nbytes for parameter in layer.parameters())
    title = f"{name}{', with its adapter' if adapter else ''}{f', {packed.kind}' if packed else ''}"
    return Case(title, (x_1SI,), trained, lambda x: (layer(x),), definition, layer, kept)


def _loss(model: Decoder, hidden_TH: Tensor) -> Case:
    weight, count = model.head.weight, len(hidden_TH)
    labels_T = torch.arange(count, device=hidden_TH.device) * 7 % model.sizes.vocabulary

    def run(hidden: Tensor) -> Outputs:
        return (linear_cross_entropy(hidden, weight, labels_T, form_now(model.form, model.training)),)

    def definition(hidden: Tensor, given: Tensor = weight) -> Outputs:
        if hidden.dtype == torch.float64:
            logits = linear(hidden, given.to(hidden.dtype))
            return (nn.functional.cross_entropy(logits, labels_T, reduction="sum"),)
        return (linear_cross_entropy_reference(hidden, given, labels_T),)

    return Case("head and cross-entropy", (hidden_TH,), _trained(weight), run, definition, read=weight.nbytes)
