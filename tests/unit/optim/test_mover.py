"""Updates within the backward pass: as in an ordinary step, one gradient at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW

from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.mover import FusedMover
from glm_accelerate.runtime.errors import UserError


@pytest.mark.parametrize("kind", [AdamW, Adafactor])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_updates_are_those_of_an_ordinary_step(
    kind: Any, tied: bool, recompute: bool, make_model: Callable[..., Path]
) -> None:
    path = make_model("glm4", tie_word_embeddings=tied)

    def trained(fuse: bool) -> tuple[list[float], list[Tensor]]:
        model = load_model(path).train().requires_grad_(True)
        model.recompute = recompute
        optimizer = kind(model.parameters(), lr=1e-2)
        fused = FusedMover(optimizer, model.parameters()) if fuse else None
        norms: list[float] = []
        for _ in range(4):
            tokens = torch.arange(60)[None] % 131
            if fused is not None:
                fused.begin(1e-2)
            model.head(model.hidden(tokens, Layout.of_documents([(60,)]))).square().mean().backward()
            if fused is not None:
                norms.append(fused.norm().item())
                assert all(p.grad is None for p in model.parameters())
            else:
                norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
                optimizer.step()
                optimizer.zero_grad()
        return norms, list(model.parameters())

    plain, fused = trained(False), trained(True)
    assert fused[0] == pytest.approx(plain[0], 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], fused[1], strict=True))


def test_one_gradient_lives_at_a_time() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    seen: list[int] = []

    class Counted(AdamW):
        def step(self, closure: Any = None) -> None:
            seen.append(sum(parameter.grad is not None for parameter in model.parameters()))
            super().step(closure)

    fused = FusedMover(Counted(model.parameters()), model.parameters())
    fused.begin(1e-2)
    model(torch.randn(2, 8)).sum().backward()
    assert seen == [1] * 8
    fused.close()
    model(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_stops_the_updates_below_it() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    before = [parameter.clone() for parameter in model.parameters()]
    model[1].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * float("nan"),))
    fused = FusedMover(AdamW(model.parameters()), model.parameters())
    fused.begin(1e-2)
    model(torch.randn(2, 8)).sum().backward()
    assert not torch.isfinite(fused.norm())
    kept = [torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert kept == [True, True] + [False] * 6
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    fused.begin(1e-2)
    assert fused.norm() == 0


def test_several_passes_a_step_are_refused() -> None:
    model = nn.Linear(3, 3)
    fused = FusedMover(AdamW(model.parameters()), model.parameters())
    fused.begin(1e-2, 1)
    with pytest.raises(UserError, match=r"train\.micro_tokens"):
        fused.begin(1e-2, 2)
