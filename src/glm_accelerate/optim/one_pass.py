"""AdamW in one pass over memory (kernels/native/adamw.cpp): clipping, the update, and the copies in bfloat16
that layers multiply with. Its state is that of torch's AdamW, so a run goes on with either.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_accelerate.models.linear import Linear


class OnePassAdamW(Optimizer):
    """For float32 weights on a CPU, with gradients in float32 or bfloat16."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.copies: dict[Tensor, Tensor] = {}  # of weights, written with them
        self.factor = 1.0  # by which the next step multiplies all gradients

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for step, weights in self._by_step(group["params"]).items():
                states = [self.state[weight] for weight in weights]
                torch.ops.glm_accelerate.adamw(
                    weights,
                    [weight.grad.contiguous() for weight in weights if weight.grad is not None],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [self.copies.get(weight, weight.new_empty(0)) for weight in weights],
                    step,
                    self.factor,
                    group["lr"],
                    group["weight_decay"],
                    *group["betas"],
                    group["eps"],
                )

    def _by_step(self, weights: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Those that have a gradient, by the number of their step, which is counted here."""
        by_step: defaultdict[int, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["step"] += 1
            by_step[int(state["step"])].append(weight)
        return by_step


def keep_copies(optimizer: Optimizer, model: nn.Module) -> None:
    """If the optimizer is our own, layers multiply with bfloat16 copies of their weights, and it writes both.

    A weight shared with the embedding gets no copy: the embedding looks up in float32.
    """
    if not isinstance(optimizer, OnePassAdamW):
        return
    owners = Counter(weight for part in model.modules() for weight in part.parameters(recurse=False))
    for part in model.modules():
        if not isinstance(part, Linear) or not part.plain or not part.native:
            continue
        if part.weight.requires_grad and owners[part.weight] == 1:
            optimizer.copies[part.weight] = part.keep_copy(torch.bfloat16)
