"""A smaller model of a plain one, and back: neighbouring layers share projections, and large matrices become
products of two thin ones, W ~ outer inner, at the rank that keeps a share of W's energy.

layers  0 1 | 2 3 | 4 5      each group has the q_proj and k_proj of its first layer
Letters: O outputs, I inputs, R rank.
"""

import torch
from torch import Tensor, nn

from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.families import FAMILIES
from glm_accelerate.models.linear import linear_layers
from glm_accelerate.models.sizes import Compression, Sizes
from glm_accelerate.models.write import split_fused
from glm_accelerate.runtime.errors import UserError

MULTIPLE = 16  # ranks are rounded up to it: tiles of matrix products are no finer


@torch.no_grad()
def compress(model: Decoder, *, share_qk: int = 1, keep_energy: float = 1.0) -> Decoder:
    """A frozen model in which so many neighbouring layers share projections, and every matrix that gets
    smaller by it is factored. What stays as it is lies in the same memory.
    """
    sizes = model.sizes
    if not sizes.plain:
        raise UserError("the model is compressed already", cure="begin with the plain one")
    if share_qk == 1 and keep_energy == 1:
        raise UserError("nothing is to be compressed", cure="--share-qk 2, --keep-energy 0.7, or both")
    if not 1 <= share_qk <= sizes.layers or not 0 < keep_energy <= 1:
        limits = f"1 to {sizes.layers} layers can share, and a share of the energy is above 0 and at most 1"
        raise UserError(f"--share-qk {share_qk} --keep-energy {keep_energy:g}: {limits}")
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    if share_qk > 1:
        parts = (split_fused(name, tensor, sizes) for name, tensor in tensors.items())
        tensors = {name: tensor for split in parts for name, tensor in split}
    ranks: dict[str, int] = {}
    if keep_energy < 1:
        for name, _ in linear_layers(_empty(Compression(share_qk).applied_to(sizes), model)):
            pair = factored(tensors[f"{name}.weight"], keep_energy)
            if pair is not None:
                del tensors[f"{name}.weight"]
                tensors[f"{name}.outer.weight"], tensors[f"{name}.inner.weight"] = pair
                ranks[name] = len(pair[1])
                if f"{name}.bias" in tensors:
                    tensors[f"{name}.outer.bias"] = tensors.pop(f"{name}.bias")
    return _filled(Compression(share_qk, ranks).applied_to(sizes), model, tensors)


@torch.no_grad()
def expand(model: Decoder) -> Decoder:
    """A frozen plain model with the same logits within rounding; `model` itself, if it is plain."""
    if model.sizes.plain:
        return model
    sizes = FAMILIES[model.origin.family].read(model.origin.config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):  # shared ones by each of their names
        if name.endswith(".outer.weight"):
            inner_RI = model.get_parameter(name.replace(".outer.", ".inner."))
            tensors[name.replace(".outer.", ".")] = (tensor.float() @ inner_RI.float()).to(tensor.dtype)
        elif not name.endswith(".inner.weight"):
            tensors[name.replace(".outer.", ".")] = tensor.clone()
    if sizes.fused_qkv and not model.sizes.fused_qkv:
        for name in [name for name in tensors if ".q_proj." in name]:
            parts = [tensors.pop(name.replace("q_proj", leaf)) for leaf in ("q_proj", "k_proj", "v_proj")]
            tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    return _filled(sizes, model, tensors)


def factored(weight_OI: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """The best two matrices, outer and inner (Eckart, Young), at the least rank that keeps `energy`, a share
    of the squared singular values' sum; None where they would hold no fewer weights. Both carry each value's
    root.
    """
    outputs, inputs = weight_OI.shape
    wide_OI = weight_OI.double()
    short_SL = wide_OI if outputs <= inputs else wide_OI.T
    # The squares of all singular values for a tenth of an SVD's time; double, since they are squares.
    squares_S, basis_SS = torch.linalg.eigh(short_SL @ short_SL.T)
    rank = rank_for(squares_S.flip(0), energy)
    if rank * (outputs + inputs) >= outputs * inputs:
        return None
    basis_SR = basis_SS[:, -rank:].flip(1)
    rest_RL = basis_SR.T @ short_SL
    root_R = rest_RL.norm(dim=1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    pair = basis_SR * root_R, rest_RL / root_R[:, None]
    outer_OR, inner_RI = pair if outputs <= inputs else (pair[1].T, pair[0].T)
    return outer_OR.to(weight_OI.dtype).contiguous(), inner_RI.to(weight_OI.dtype).contiguous()


def rank_for(squares: Tensor, energy: float) -> int:
    """How many of these squares (falling) make up the share `energy` of their sum, rounded up."""
    sums = squares.clamp(min=0).cpu().cumsum(0)  # on a GPU it has no deterministic form
    needed = int((sums < energy * sums[-1]).sum()) + 1
    return -(-needed // MULTIPLE) * MULTIPLE


def _empty(sizes: Sizes, model: Decoder) -> Decoder:
    with torch.device("meta"):
        return Decoder(sizes, model.origin)


def _filled(sizes: Sizes, model: Decoder, tensors: dict[str, Tensor]) -> Decoder:
    """A model of these sizes with these tensors."""
    filled = _empty(sizes, model)
    if odd := [
        name for name in tensors if "lora_" in name or ".packed." in name or name.startswith("prefix.")
    ]:
        raise UserError(
            f"the model is not whole: it has {odd[0]}", cure="merge adapters; load it unquantised"
        )
    for name in [name for name, _ in filled.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        setattr(filled.get_submodule(owner), leaf, nn.Parameter(tensors[name].detach(), requires_grad=False))
    if sizes.tied:
        filled.head.weight = filled.embed
    filled.compute = model.compute
    bind_operators(filled)
    return filled.train(model.training)
