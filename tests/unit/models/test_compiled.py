"""A model with compiled operators learns as the eager one does, and evaluates as it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm_accelerate.kernels.compiled import missing
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model

pytestmark = [
    pytest.mark.process,  # a compiler's
    pytest.mark.skipif(bool(missing("cpu")), reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it compiles
]


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_gradients_are_those_of_the_eager_model(family: str, make_model: Callable[..., Path]) -> None:
    directory = make_model(family)
    layout = Layout.of_documents([(7, 20, 1, 13)])
    tokens = torch.randint(0, 131, (1, 41), generator=torch.Generator().manual_seed(1))
    slope = torch.randn(1, 41, 1, generator=torch.Generator().manual_seed(2))
    found: list[dict[str, torch.Tensor]] = []
    for compute in (torch.float32, torch.bfloat16, torch.bfloat16):
        model = load_model(directory).train().requires_grad_(True)
        model.compute = compute
        if len(found) == 2:
            bind_operators(model, compiled=True)
        out = model.hidden(tokens, layout)
        (out * slope).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"out": out.detach(), **grads})
    exact, eager, mine = found
    assert exact.keys() == mine.keys()
    for name, truth in exact.items():
        size = truth.abs().max()
        error, other = ((each[name] - truth).abs().max() / size for each in (mine, eager))
        assert error <= 2 * other + 0.01, name
    eager_model, compiled_model = (load_model(directory).eval() for _ in range(2))
    bind_operators(compiled_model, compiled=True)
    with torch.no_grad():
        assert torch.equal(compiled_model(tokens), eager_model(tokens))
