"""Frozen weights of a stack of blocks that live in host memory: LoRA on a base that does not fit.

forward:  [0] 1 -> [1] 2 -> ... -> [n-1]   backward:  [n-1] n-2 -> ... -> [1] 0 -> [0]
[i] computes while the copy of its neighbour is on the way; all other blocks hold no device memory. Autograd
keeps references to weights, not to what is in them: a weight comes back into the same storage.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm_accelerate.memory.stream import Copy, Lane

LEAST = 2**16  # bytes: norms and biases stay


class _Weight:
    """A frozen parameter whose home is the host."""

    def __init__(self, parameter: nn.Parameter, lane: Lane) -> None:
        self.parameter, self.lane = parameter, lane
        self.host = lane.on_host(parameter.detach()).copy_(parameter.detach())
        self.coming: Copy | None = None
        parameter.data = torch.empty_like(self.host, device=lane.device)
        self._empty()

    def bring(self) -> None:
        if self.coming is None:
            here = self.parameter.data  # an alias: writing to it is no change that autograd has to know of
            here.untyped_storage().resize_(self.host.untyped_storage().nbytes())
            self.coming = self.lane.copy(self.host, here)

    def ready(self) -> None:
        self.bring()
        assert self.coming is not None
        self.coming.wait()

    def drop(self) -> None:
        if self.coming is not None:
            self.coming.wait()
            self.coming = None
            self._empty()

    def _empty(self) -> None:
        self.parameter.data.untyped_storage().resize_(0)


class FrozenWeights:
    """Set up by its constructor, with the model wherever it was read; then move the rest: `model.to(device)`.

    What trains stays on the device, and so do weights of several blocks, or of less than `least` bytes.
    While it holds, nothing but a pass of the model may read the weights: their memory is empty.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        device: torch.device,
        *,
        least: int = LEAST,
        lane: Lane | None = None,
    ) -> None:
        blocks, lane = list(blocks), lane or Lane(device)
        uses = Counter(parameter for block in blocks for parameter in set(block.parameters()))
        assert len(set(blocks)) == len(blocks), "a block that runs twice has no place of its own in the order"
        self.blocks = [
            [
                _Weight(parameter, lane)
                for parameter in block.parameters()
                if not parameter.requires_grad and uses[parameter] == 1 and parameter.nbytes >= least
            ]
            for block in blocks
        ]
        self.hooks = [
            hook
            for number, block in enumerate(blocks)
            for hook in (
                block.register_forward_pre_hook(partial(self._before, number)),
                block.register_forward_hook(partial(self._after, number)),
            )
        ]

    def close(self) -> None:
        """All weights on the device, for good."""
        for hook in self.hooks:
            hook.remove()
        for weights in self.blocks:
            for weight in weights:
                weight.ready()
        self.blocks = []

    def _before(self, number: int, _: nn.Module, __: tuple[Any, ...]) -> None:
        if not _in_backward():  # else the block is computed again, and its gradient has brought its weights
            self._hold(number, number + 1)

    def _after(self, number: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not _in_backward():
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._back, number))

    def _back(self, number: int, _: Tensor) -> None:
        self._hold(number, number - 1)

    def _hold(self, number: int, neighbour: int) -> None:
        """This block's weights are here, its neighbour's are on the way, and no others."""
        for other, weights in enumerate(self.blocks):
            if other not in (number, neighbour):
                for weight in weights:
                    weight.drop()
        for weight in self.blocks[number]:
            weight.ready()
        if 0 <= neighbour < len(self.blocks):
            for weight in self.blocks[neighbour]:
                weight.bring()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
