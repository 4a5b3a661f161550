"""Which device a process computes on, and its record (runtime/devices/). Tensors go to it from here."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.runtime.devices.nvidia import Nvidia
from glm_accelerate.runtime.devices.record import Cpu, Device
from glm_accelerate.runtime.errors import UserError

ACCELERATORS: tuple[type[Device], ...] = (Nvidia,)  # the first that is present is used


def device_kind(name: str) -> type[Device]:
    """The class for this kind of device (`cpu`, `cuda`, ...), whether or not one is here."""
    return next((kind for kind in ACCELERATORS if kind.kind == name), Cpu)


def device_of(device: torch.device | str) -> Device:
    """The record of a device."""
    device = torch.device(device)
    return device_kind(device.type)(device)


def present_kind() -> type[Device]:
    """The kind of accelerator in this machine, else the CPU."""
    return next((kind for kind in ACCELERATORS if kind.module().is_available()), Cpu)


def current_device() -> Device:
    """The current accelerator if there is one, else the CPU."""
    kind = present_kind()
    if kind is Cpu:
        return Cpu(torch.device("cpu"))
    return kind(torch.device(kind.kind, kind.module().current_device()))


def device_lost(reason: str) -> bool:
    """Whether an error means that a device no longer computes."""
    return any(f"{kind.software} error" in reason for kind in ACCELERATORS)


def take_device(device: torch.device | str | None) -> torch.device:
    """Choose the device that this process works on, once, at its start; by default the current one."""
    if device is None:
        return current_device().device
    device_of(device).make_current()
    return resolved(torch.device(device))  # says what is wrong with one that is not there


def resolved(device: torch.device) -> torch.device:
    """The device as its tensors name it: `cuda:0` for `cuda`, which does not compare as equal."""
    return torch.empty(0, device=device).device


def take_local(number: int) -> Device:
    """The device of the process with this number on its machine. It makes no context on other devices."""
    kind = present_kind()
    if kind is Cpu:
        return current_device()
    count = kind.module().device_count()
    if number >= count:
        what = f"process {number + 1} of this machine has no {kind.label}: there are {count}"
        raise UserError(what, cure=f"--nproc {count}")
    record = kind(torch.device(kind.kind, number))
    record.make_current()
    return record


class Stopwatch:
    """The seconds of some stretches of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._begun: Any = None  # None: it stands
        self._spans: list[tuple[Any, Any]] = []

    def go(self) -> None:
        """From here on."""
        self._begun = self._device.mark()

    def stop(self) -> None:
        """Up to here, if it runs."""
        if self._begun is not None:
            self._spans.append((self._begun, self._device.mark()))
            self._begun = None

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """While entered, it stands."""
        ran = self._begun is not None
        self.stop()
        yield
        if ran:
            self.go()

    def read(self) -> float:
        """What has been since it was read last. The device is past it."""
        seconds = sum(self._device.between(*span) for span in self._spans)
        self._spans.clear()
        return seconds


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, which takes pinned memory."""
    if device_kind(device.type).streams:
        tensor = pinned_like(tensor).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def pinned_like(pattern: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pinned memory on the host, which copies faster; ordinary memory where the system refuses it."""
    try:
        return torch.empty_like(pattern, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"host memory cannot be pinned, copies are slower: {reason}", stacklevel=2)
        return torch.empty_like(pattern, dtype=dtype, device="cpu")
