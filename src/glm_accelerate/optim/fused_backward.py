"""The update as part of the backward pass: a gradient is used where it is made, and freed at once.

backward: ... -> gradient of a weight is whole -> its update -> freed -> the next one ...
So gradients take the room of the largest one. For any ordinary optimizer and parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_accelerate.runtime.errors import UserError


class FusedBackward:
    """Bound to an optimizer by being made. `begin` before a step's backward pass, `end` after it.

    A gradient that is not finite stops the updates of its step: neither this weight nor any that follows in
    the backward pass is updated. Those before it (nearer to the loss) are, and stay so. A loss that is not
    finite makes the first gradient so, and nothing is updated.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.sound = True
        self.squares: list[Tensor] = []
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def begin(self, passes: int = 1) -> None:
        """Before the backward pass of a step, with the optimizer's rate set. `passes`: of the step."""
        if passes > 1:
            raise UserError(
                f"a step of {passes} passes has to add their gradients up, memory.fuse_update frees them",
                cure="memory.fuse_update=off, fewer samples a step, or a larger train.micro_tokens",
            )
        self.sound = True
        self.squares.clear()

    def end(self) -> Tensor:
        """The norm of all gradients together, not finite where one was not. Waits for nothing."""
        return torch.stack(self.squares).sum().sqrt() if self.squares else torch.zeros(())

    def close(self) -> None:
        """The optimizer is an ordinary one again."""
        for hook in self.hooks:
            hook.remove()

    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).double().square()
        self.squares.append(square)
        self.sound = self.sound and bool(torch.isfinite(square))  # waits for the device, once a parameter
        if self.sound:
            self.optimizer.step()  # of all parameters this one alone has a gradient
        parameter.grad = None
