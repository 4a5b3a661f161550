"""Neighbouring layers that share their query and key projections.

layers  0 1 | 2 3 | 4 5      each group has one q_proj and one k_proj: the very same modules in its layers

What is shared has one name, that of its first layer, wherever parameters are listed, trained or saved.
"""

from copy import deepcopy

import torch
from torch import nn

from glm_accelerate.models.adapt.lowrank import holding
from glm_accelerate.models.attention import Attention
from glm_accelerate.models.decoder import Decoder

SHARED = ("q_proj", "k_proj")


def share_qk(model: Decoder, neighbours: int) -> None:
    """Groups of so many layers go on with one of each projection, in place."""
    attentions = _attentions(model)
    for attention in attentions:
        _split(attention)
    for place, attention in enumerate(attentions):
        first = attentions[place - place % neighbours]
        for leaf in SHARED:
            setattr(attention, leaf, first.get_submodule(leaf))


def unshare(model: Decoder) -> None:
    """Every layer has its own again, equal to what it shared, in place."""
    seen: set[nn.Module] = set()
    for attention in _attentions(model):
        for leaf in SHARED if not attention.fused else ():
            layer = attention.get_submodule(leaf)
            if layer in seen:
                setattr(attention, leaf, deepcopy(layer))
            seen.add(layer)
        if model.sizes.fused_qkv and not attention.fused:
            _fuse(attention)


def sharing(model: Decoder) -> int:
    """How many neighbouring layers share projections; 1: each has its own."""
    first, *others = _attentions(model)
    if first.fused:
        return 1
    return 1 + sum(other.q_proj is first.q_proj for other in others)


def _attentions(model: Decoder) -> list[Attention]:
    return [part for part in model.layers.modules() if isinstance(part, Attention)]


def _split(attention: Attention) -> None:
    """ChatGLM's one matrix of queries, keys and values, as three that can be shared one by one."""
    if not attention.fused:
        return
    whole = attention.query_key_value
    key = whole.outputs // (attention.groups + 2)
    rows = (whole.outputs - 2 * key, key, key)
    biases = (None, None, None) if whole.bias is None else whole.bias.detach().split(rows)
    parts = zip(("q_proj", "k_proj", "v_proj"), whole.weight.detach().split(rows), biases, strict=True)
    del attention.query_key_value
    for leaf, weight, bias in parts:
        setattr(attention, leaf, holding(weight.clone(), None if bias is None else bias.clone()))
    attention.fused = False


def _fuse(attention: Attention) -> None:
    """The one matrix again."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [part.bias for part in parts if part.bias is not None]
    attention.query_key_value = holding(
        torch.cat([part.weight.detach() for part in parts]),
        torch.cat([bias.detach() for bias in biases]) if biases else None,
    )
    del attention.q_proj, attention.k_proj, attention.v_proj
    attention.fused = True
