"""What becomes of a step's gradients, whatever the optimizer is and wherever it works.

begin(rate, passes) -> backward, so often -> sum_gradients() -> norm() -> move(norm), unless the step is not
applied -> end()
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from glm_accelerate.memory.static import make_moments
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.one_pass import OnePassAdamW
from glm_accelerate.optim.state import load_state, state_of
from glm_accelerate.parallel.part import local_of, whole
from glm_accelerate.parallel.sums import GradientSums
from glm_accelerate.parallel.table import ONE_PROCESS, CutTable
from glm_accelerate.runtime.errors import UserError

Named = Iterable[tuple[str, Tensor]]


class Mover:
    """Any optimizer of torch's, on the device of its weights. `clip`: the largest norm; 0 for any."""

    def __init__(self, optimizer: Optimizer, table: CutTable = ONE_PROCESS, clip: float = 0.0) -> None:
        self.optimizer, self.table, self.clip = optimizer, table, clip
        self._sums = GradientSums(table)

    def begin(self, rate: float, passes: int = 1) -> None:
        """Before the backward passes of a step, of which so many are run."""
        self._sums.begin(passes)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's: its compiled updates read it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def sum_gradients(self) -> None:
        """Over ranks, in place: those of which no sum was begun while passes ran, and wait for all."""
        self._sums.finish()

    def norm(self, scale: float = 1.0) -> Tensor:
        """The norm of all gradients before clipping, as if the loss had not been multiplied by `scale`."""
        return self.table.norm(self._weights(), self._norm) / scale

    def move(self, norm: Tensor, scale: float = 1.0) -> None:
        """Clip by the norm, and update the weights. Does not wait for the device."""
        self._update(clipped(whole(norm), self.clip, scale))

    def end(self) -> None:
        """Forget the step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def discard_next(self) -> None:
        """The backward passes before the next `begin` update nothing."""

    def make_moments(self) -> None:
        """Allocate all state that updates will need, before the first of them."""
        make_moments(self.optimizer)

    def masters(self, named: Named) -> Iterator[tuple[str, Tensor, bool]]:
        """For the name of each weight what the optimizer updates, and whether that has more digits."""
        return ((name, weight, False) for name, weight in named)

    def state(self, named: Named) -> dict[str, Tensor]:
        """What the optimizer remembers, as plain tensors by the names of weights."""
        return state_of(self.optimizer, self.masters(named))

    def load(self, named: Named, state: dict[str, Tensor]) -> None:
        """Load what `state` gave. The weights are loaded already."""
        load_state(self.optimizer, self.masters(named), state)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self._weights() if weight.grad is not None]

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """torch's norm of a large tensor takes one core of a CPU, its product of two vectors takes all."""
        if not gradients or not all(map(_plain, gradients)):
            return get_total_norm(gradients)
        squares = [torch.dot(gradient.view(-1), gradient.view(-1)) for gradient in gradients]
        return torch.stack(squares).double().sum().sqrt().float()

    def _update(self, factor: Tensor) -> None:
        if factor.device.type != "cpu" or factor != 1:  # a CPU can look without waiting
            parts = [local_of(gradient) for gradient in self._gradients()]
            torch._foreach_mul_(parts, factor)  # pyright: ignore[reportPrivateUsage]
        self.optimizer.step()


class OnePassMover(Mover):
    """Our AdamW for CPUs, which multiplies gradients while it reads them."""

    optimizer: OnePassAdamW

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            return super()._norm(gradients)
        return torch.tensor(torch.ops.glm_accelerate.squares(gradients)).sqrt()

    def _update(self, factor: Tensor) -> None:
        self.optimizer.factor = factor.item()
        self.optimizer.step()


class HostMover(Mover):
    """For an optimizer in host memory: gradients have arrived there by the time they are asked for."""

    optimizer: HostOptimizer

    def make_moments(self) -> None:
        make_moments(self.optimizer.inner)

    def masters(self, named: Named) -> Iterator[tuple[str, Tensor, bool]]:
        return self.optimizer.masters(named)

    def load(self, named: Named, state: dict[str, Tensor]) -> None:
        self.optimizer.refresh()
        super().load(named, state)

    def norm(self, scale: float = 1.0) -> Tensor:
        return self._norm(self._gradients()) / scale

    def _gradients(self) -> list[Tensor]:
        return self.optimizer.gradients()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        if all(map(_plain, gradients)):
            return super()._norm(gradients)
        return torch.stack([vector_norm(each, dtype=torch.float32) for each in gradients]).norm()

    def _update(self, factor: Tensor) -> None:
        self.optimizer.factor = factor.item()
        self.optimizer.step()


class FusedMover(Mover):
    """The update as part of the backward pass: a gradient is used where it is made, and freed at once. So
    gradients take the room of the largest one.

    A gradient that is not finite stops the updates of its step: neither this weight nor any that follows in
    the backward pass is updated. Those before it (nearer to the loss) are, and stay so. A loss that is not
    finite makes the first gradient so, and nothing is updated.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Iterable[nn.Parameter], table: CutTable = ONE_PROCESS
    ) -> None:
        super().__init__(optimizer, table)
        self._sound = True
        self._squares: list[Tensor] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._use)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def begin(self, rate: float, passes: int = 1) -> None:
        if passes > 1:
            raise UserError(
                f"a step of {passes} passes has to add their gradients up, memory.fuse_update frees them",
                cure="memory.fuse_update=off, fewer samples a step, or a larger train.micro_tokens",
            )
        super().begin(rate)
        self._sound = True
        self._squares.clear()

    def norm(self, scale: float = 1.0) -> Tensor:
        assert scale == 1.0
        return torch.stack(self._squares).sum().sqrt() if self._squares else torch.zeros(())

    def move(self, norm: Tensor, scale: float = 1.0) -> None:
        """The weights have moved."""

    def discard_next(self) -> None:
        self._sound = False  # gradients are freed as they come

    def close(self) -> None:
        """The optimizer is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()

    def _use(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        square = vector_norm(parameter.grad, dtype=torch.float32).double().square()
        self._squares.append(square)
        self._sound = self._sound and bool(torch.isfinite(square))  # waits for the device, once a parameter
        if self._sound:
            self.optimizer.step()  # of all parameters this one alone has a gradient
        parameter.grad = None


def mover_of(
    optimizer: Optimizer,
    table: CutTable = ONE_PROCESS,
    clip: float = 0.0,
    fused: Iterable[nn.Parameter] | None = None,
) -> Mover:
    """The mover for an optimizer. `fused`: parameters that it updates within the backward pass."""
    if fused is not None:
        return FusedMover(optimizer, fused, table)
    kinds: dict[type[Optimizer], type[Mover]] = {OnePassAdamW: OnePassMover, HostOptimizer: HostMover}
    return kinds.get(type(optimizer), Mover)(optimizer, table, clip)


def clipped(norm: Tensor, limit: float, scale: float = 1.0) -> Tensor:
    """The factor for gradients times `scale` that makes their norm at most `limit` (0: any)."""
    return ((limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)) / scale


def _plain(gradient: Tensor) -> bool:
    """Whether it is on the CPU, in float32, contiguous."""
    whole = type(gradient) is Tensor and gradient.device.type == "cpu"
    return whole and gradient.dtype == torch.float32 and gradient.is_contiguous()
