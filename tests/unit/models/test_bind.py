"""What the list of paths says is what the model holds, and what its backward pass is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.bind import bind_operators, bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model

Method = Literal["lora", "full", "freeze", "prefix"]


def own_passes(out: torch.Tensor) -> set[str]:
    """The files of all own backward passes that made `out`."""
    found: set[str] = set()
    seen: set[object] = set()
    waiting: list[object] = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]  # pyright: ignore
        own = getattr(type(node), "_forward_cls", None)
        found |= {f"{own.__module__}.{own.__name__}".rpartition("kernels.")[2]} if own else set()
    return found


def run(model: Decoder) -> set[str]:
    return own_passes(model.hidden(torch.arange(9)[None], Layout.of_documents([(4, 5)])))


@pytest.mark.parametrize("family", ["chatglm", "glm", "glm4"])
@pytest.mark.parametrize("method", ["lora", "full", "prefix"])
def test_a_model_on_a_cpu(family: str, method: Method, make_model: Callable[..., Path]) -> None:
    model = load_model(make_model(family))
    adapt(model, AdaptSection(method=method))
    bind_operators(model)
    paths = {choice.operator: choice.path for choice in bound(model)}
    assert ("norm, sum and norm" in paths) == (family == "glm4")
    assert all("Triton" not in path and "compiled" not in path for path in paths.values())
    assert ("LoRA" in paths) == (method == "lora")
    layers = 4 if family == "chatglm" else 6  # its queries, keys and values come from one
    assert paths["LoRA" if method == "lora" else "plain products"].startswith(
        f"{3 * layers + (method != 'lora')} "
    )
    passes = run(model.train())
    assert {"rms_norm._RMSNorm", "rope._Turn", "swiglu._SwiGLU"} <= passes
    assert ("linear._LoraLinear" in passes) == (method == "lora")


def test_a_model_that_was_not_bound_is_not_listed_as_if_it_were(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm4"))
    model.compiled = True
    with pytest.raises(AssertionError, match="bind_operators was not called"):
        bound(model)
