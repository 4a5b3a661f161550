"""A whole tiny decoder with Triton's operators, run by its interpreter, learns as the eager one does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_accelerate.models.bind import PARTS
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model


def bind_triton(model: Decoder) -> None:
    """What `bind_operators` does on a GPU."""
    for part in model.modules():
        if isinstance(part, PARTS):
            part.form = "triton"


def gradients(model: Decoder, tokens: Tensor, layout: Layout) -> dict[str, Tensor]:
    out = model.hidden(tokens, layout)
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return {
        "out": out.detach(),
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def operators(out: Tensor) -> set[str]:
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
        found |= {own.__module__.removeprefix("glm_accelerate.kernels.")} if own else set()
    return found


ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = Layout.of_documents([(5, 1, 6)], ON)
TOKENS = torch.randint(0, 131, (1, 12), generator=torch.Generator().manual_seed(1)).to(ON)


@pytest.mark.parametrize("family", ["chatglm", "glm", "glm4"])
def test_whole_decoder(family: str, make_model: Callable[..., Path]) -> None:
    """Every gradient; and nothing but Triton's norms, gates and rotations is on the way."""
    directory = make_model(family)
    exact_model, eager, mine = (
        load_model(directory, device=ON).train().requires_grad_(True) for _ in range(3)
    )
    bind_triton(mine)
    exact_model.double()
    truth, other, found = (gradients(model, TOKENS, LAYOUT) for model in (exact_model, eager, mine))
    assert truth.keys() == found.keys()
    in_a_row = 2 * 12 * len(eager.layers)  # operators: about twelve a block, there and back, each rounds once
    for name, true in truth.items():
        ulp = torch.finfo(torch.float32).eps * true.abs().max()
        allowed = 2 * (other[name] - true).abs().max() + in_a_row * ulp
        assert (found[name] - true).abs().max() <= allowed, name
    assert operators(mine.hidden(TOKENS, LAYOUT)) == {"triton_rms_norm", "triton_swiglu", "triton_rope"}


def test_recomputed_blocks_and_evaluation_are_the_same(make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4")
    kept, again = (load_model(directory, device=ON).train().requires_grad_(True) for _ in range(2))
    again.recompute = True
    for model in (kept, again):
        bind_triton(model)
    first, second = (gradients(model, TOKENS, LAYOUT) for model in (kept, again))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    with torch.no_grad():
        assert torch.equal(kept.eval().hidden(TOKENS, LAYOUT), first["out"])
