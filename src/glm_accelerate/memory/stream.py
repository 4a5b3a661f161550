"""Copies between a device and the host, beside the computation: streams wait for them, not the program.

On a GPU: pinned memory and a stream of its own. On a CPU the same calls copy at once, so that the order of
copies and the life of every tensor are the same, and tested, where there is no GPU.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_accelerate.runtime.device import device_kind, pinned_like


@dataclass(slots=True)
class Copy:
    """A copy under way. `source` is held until it is over, as the copy reads it."""

    source: Tensor | None
    result: Tensor
    event: torch.Event | None

    def wait(self) -> Tensor:
        """What the current stream does from here on finds the result whole. The program goes on."""
        if self.event is not None:
            self.event.wait(torch.get_device_module(self.event.device).current_stream(self.event.device))
        return self.result

    def finish(self) -> Tensor:
        """The program stops until the result is whole, for the host to read."""
        if self.event is not None:
            self.event.synchronize()
        self.source = None
        return self.result


class Lane:
    """One after the other, copies from and to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = (
            torch.get_device_module(device).Stream(device) if device_kind(device.type).streams else None
        )

    def on_host(self, pattern: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory on the host, shaped like `pattern`; pinned, where copies run beside computation."""
        if self.stream is not None:
            return pinned_like(pattern, dtype)
        return torch.empty_like(pattern, dtype=dtype, device="cpu")

    def to_host(self, tensor: Tensor) -> Copy:
        return self.copy(tensor, self.on_host(tensor))

    def to_device(self, tensor: Tensor) -> Copy:
        return self.copy(tensor, torch.empty_like(tensor, device=self.device))

    def copy(self, source: Tensor, target: Tensor) -> Copy:
        """After all work of the current stream: it may still write the source, or use memory that the target
        now has.
        """
        if self.stream is None:
            return Copy(source, target.copy_(source), None)
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream(self.device))
        with module.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(self.stream)
        return Copy(source, target, event)


class Window:
    """Copies under way whose sources take at most `room` bytes together, or are a single one."""

    def __init__(self, room: int) -> None:
        self.room, self.held = room, 0
        self.copies: deque[Copy] = deque()

    def add(self, copy: Copy) -> None:
        """Where there are too many, the current stream waits for the oldest, and their sources are let go."""
        self.copies.append(copy)
        self.held += copy.result.nbytes
        while self.held > self.room and len(self.copies) > 1:
            self._release()

    def drain(self) -> None:
        """The current stream waits for all of them."""
        while self.copies:
            self._release()

    def forget(self) -> None:
        """Nobody will read these results: their sources live as long as others hold them."""
        self.copies.clear()
        self.held = 0

    def _release(self) -> None:
        copy = self.copies.popleft()
        copy.wait()
        copy.source = None
        self.held -= copy.result.nbytes
