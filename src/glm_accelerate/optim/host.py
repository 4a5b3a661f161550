"""The optimizer in host memory: gradients go there as the backward pass computes them, weights come back.

backward: gradient -> host, freed ...   step: update there -> weight to the device, beside the next update
The device holds weights alone, in whatever dtype; float32 masters and moments, and a step's gradients, are on
the host. For any optimizer, several passes a step, and clipping by the norm of all gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_accelerate.memory.stream import Copy, Lane, Window
from glm_accelerate.optim.one_pass import OnePassAdamW

ROOM = 2**28  # bytes of gradients that may be on their way out

Groups = list[dict[str, Any]]


class HostOptimizer(Optimizer):
    """`make` builds the optimizer that does the updates, from groups with masters instead of weights.

    Weights are moved to `device`, wherever they are, and matrices are kept there in `dtype`, if one is given:
    that of products, as the device never needs to hold more.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make: Callable[[Groups], Optimizer],
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        room: int = ROOM,
    ) -> None:
        self.lane = Lane(device)
        self.window = Window(room)
        self.weights: dict[nn.Parameter, nn.Parameter] = {}  # by master
        self.inner = make(
            [group | {"params": [self._master(p, dtype) for p in group["params"]]} for group in groups]
        )
        super().__init__(self.inner.param_groups, {})  # the same groups: a rate set in one is set in both
        self.state = self.inner.state
        self.coming: dict[nn.Parameter, Copy] = {}  # gradients of the pass that ran last
        self.whole: dict[nn.Parameter, Tensor] = {}  # ... of all passes before it together
        self.factor = 1.0  # by which the next step multiplies all gradients
        for master, weight in self.weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._leave, master))

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """The gradients of all passes of the step together. Waits until they are all here."""
        self.window.drain()
        for master in list(self.coming):
            self._add(master)
        return [self.whole[master] for master in self.weights if master in self.whole]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One weight after the other: while one is updated the one before it is on its way."""
        assert closure is None
        self.gradients()
        for master in list(self.whole):
            gradient = self.whole.pop(master)
            weight = self.weights[master].data
            self.window.add(self.lane.copy(self._updated(master, gradient, weight.dtype), weight))
        self.window.drain()
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A step that is not applied leaves nothing behind."""
        assert set_to_none
        self.coming.clear()
        self.whole.clear()
        self.factor = 1.0

    def masters(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Each master by the name of its weight, and whether it has more digits."""
        by_weight = {weight: master for master, weight in self.weights.items()}
        for name, weight in named:
            if isinstance(weight, nn.Parameter) and weight in by_weight:
                master = by_weight[weight]
                yield name, master, master.dtype != weight.dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters begin anew from the weights, which have just been loaded."""
        for master, weight in self.weights.items():
            master.copy_(weight)

    def _master(self, weight: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
        master = nn.Parameter(self.lane.on_host(weight.detach(), torch.float32).copy_(weight.detach()))
        narrow = dtype if dtype is not None and weight.ndim > 1 else weight.dtype
        weight.data = weight.data.to(self.lane.device, narrow)
        self.weights[master] = weight
        return master

    def _leave(self, master: nn.Parameter, weight: Tensor) -> None:
        """A weight's gradient of this pass is whole."""
        assert weight.grad is not None
        self._add(master)
        copy = self.coming[master] = self.lane.to_host(weight.grad)
        weight.grad = None
        self.window.add(copy)

    def _add(self, master: nn.Parameter) -> None:
        """Add what is coming to what came before; one pass a step stays in the dtype that it has."""
        if (copy := self.coming.pop(master, None)) is not None:
            last, before = copy.finish(), self.whole.get(master)
            self.whole[master] = last if before is None else before.to(master.dtype).add_(last)

    def _updated(self, master: nn.Parameter, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight after its update, as it is sent. Of all masters this one alone has a gradient.

        What is sent does not change: the next update waits for gradients that come after it over the same
        lane.
        """
        kept = master.detach()
        sent = kept if kept.dtype == dtype else self.lane.on_host(kept, dtype)
        if isinstance(self.inner, OnePassAdamW):
            self.inner.factor = self.factor
            self.inner.copies = {} if sent is kept else {master: sent}
            master.grad_dtype = gradient.dtype
            master.grad = gradient
        else:
            master.grad = gradient.to(master.dtype)
            if self.factor != 1:
                master.grad.mul_(self.factor)
        self.inner.step()
        master.grad = None
        return sent if isinstance(self.inner, OnePassAdamW) or sent is kept else sent.copy_(kept)
