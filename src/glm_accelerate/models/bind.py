"""The form of every operator in a model, set once from outside, and the list of all choices."""

from collections import Counter

import torch

from glm_accelerate.kernels.choose import NOT_ASKED, Choice, OperatorWork, choices, choose_form, facts_of
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.kernels.quantized import nf4_path
from glm_accelerate.kernels.rms_norm import LANES
from glm_accelerate.models.attention import Attention
from glm_accelerate.models.decoder import MLP, Block, Decoder, RMSNorm
from glm_accelerate.models.linear import Linear

PARTS = (Attention, Block, MLP, RMSNorm)  # those that have a form


def bind_operators(model: Decoder, *, compiled: bool = False) -> None:
    """Give every part the form that `choose_form` names; `compiled` asks for our own CPU operators too."""
    device, compute = model.embed.device, model.compute or model.embed.dtype
    form, _ = choose_form(facts_of(device), compute, compiled, _native(model) if compiled else NOT_ASKED)
    assert not (compiled and form == "eager")  # float64: sums are float32
    model.compiled, model.form = compiled, form
    for part in model.modules():
        if isinstance(part, PARTS):
            part.form = form
        elif isinstance(part, Linear):
            part.native = form == "native"


def compute_in(model: Decoder, dtype: torch.dtype | None, *, compiled: bool = False) -> None:
    """Products and operators in another dtype from now on: a form that cannot compute in it is replaced."""
    model.compute = dtype
    bind_operators(model, compiled=compiled)


def bound(model: Decoder, *, training: bool = True) -> list[Choice]:
    """Every operator's path in this model."""
    facts, compute, sizes = facts_of(model.embed.device), model.compute or model.embed.dtype, model.sizes
    prefix, compiled = model.prefix is not None, model.compiled
    native = _native(model) if compiled else NOT_ASKED
    form, _ = choose_form(facts, compute, compiled, native)
    forms = {part.form for part in model.modules() if isinstance(part, PARTS)}
    assert forms == {form}, (
        f"operators are bound as {forms}, chosen was {form}: bind_operators was not called"
    )
    work = OperatorWork(compute, sizes.sandwich, sizes.head_width, training, compiled, prefix, native)
    return [*choices(facts, work), *_products(model)]


def _native(model: Decoder) -> str | None:
    """Why our own CPU operators do not run this model, or None."""
    if model.embed.device.type != "cpu" or (model.compute or model.embed.dtype) != torch.bfloat16:
        return "they are for bfloat16 on a CPU"
    sizes = model.sizes
    if sizes.width % LANES or sizes.mlp_width < LANES or sizes.head_width % 2:
        return f"they take widths in multiples of {LANES}, MLPs from {LANES} on, heads of even width"
    return native_library()


def _products(model: Decoder) -> list[Choice]:
    """Linear layers by their kind, and how many there are of each."""
    layers = [part for part in model.modules() if isinstance(part, Linear)]
    kinds = Counter(_kind(layer) for layer in layers)
    packed = {layer.packed.kind for layer in layers if layer.packed is not None}
    unpacking = [nf4_path(model.embed.device)] if "nf4" in packed else []
    return [
        *(Choice(kind, f"{count} of the layers", why) for (kind, why), count in kinds.items()),
        *unpacking,
    ]


def _kind(layer: Linear) -> tuple[str, str]:
    packed = None if layer.packed is None else layer.packed.kind
    if packed is None and layer.float8 != "off":
        how = (
            "8-bit products"
            if layer.float8 == "hardware"
            else "simulated: this machine has no 8-bit products"
        )
        return "fp8" if layer.adapter is None else "fp8 LoRA", how
    if layer.adapter is not None:
        base = f"a frozen {packed} base" if packed else "the frozen weight"
        return f"{packed} LoRA" if packed else "LoRA", f"added into the product with {base}, own backward"
    if packed:
        return packed, "unpacked for the product"
    return "plain products", "rows shared out over threads" if layer.native else "torch's"
