"""Which device a process computes on, and its record (runtime/devices/). Tensors go to it from here."""

import warnings

import torch
from torch import Tensor

from glm_accelerate.runtime.devices.nvidia import Nvidia
from glm_accelerate.runtime.devices.record import Cpu, Device
from glm_accelerate.runtime.errors import UserError

ACCELERATORS: tuple[type[Device], ...] = (Nvidia,)  # the first that is present is used


def device_kind(name: str) -> type[Device]:
    """Facts about devices of this kind (`cpu`, `cuda`, ...), whether or not there is one."""
    return next((kind for kind in ACCELERATORS if kind.kind == name), Cpu)


def device_of(device: torch.device | str) -> Device:
    """Its record."""
    device = torch.device(device)
    return device_kind(device.type)(device)


def present_kind() -> type[Device]:
    """What this machine computes with: a kind of accelerator, else the CPU."""
    return next((kind for kind in ACCELERATORS if kind.module().is_available()), Cpu)


def current_device() -> Device:
    """The current accelerator if there is one, else the CPU."""
    kind = present_kind()
    if kind is Cpu:
        return Cpu(torch.device("cpu"))
    return kind(torch.device(kind.kind, kind.module().current_device()))


def device_lost(reason: str) -> bool:
    """Whether an error says that a device computes no more."""
    return any(f"{kind.software} error" in reason for kind in ACCELERATORS)


def take_device(device: torch.device | str | None) -> torch.device:
    """What a process calls once, at its start: it works on this device from here on, if none is named on the
    current one.
    """
    if device is None:
        return current_device().device
    device_of(device).make_current()
    return resolved(torch.device(device))  # says what is wrong with one that is not there


def resolved(device: torch.device) -> torch.device:
    """As its tensors name it: `cuda` with the number of the current GPU. They do not compare as equal."""
    return torch.empty(0, device=device).device


def take_local(number: int) -> Device:
    """For the process of this number on its machine, which may have no context on another one's device."""
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


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, behind what it computes. From memory that is not pinned it would wait for all."""
    if device_kind(device.type).streams:
        tensor = pinned_like(tensor).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def pinned_like(pattern: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory on the host from which a device copies by itself, if the system lets it be: else it is as right,
    and slower.
    """
    try:
        return torch.empty_like(pattern, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"host memory cannot be pinned, copies are slower: {reason}", stacklevel=2)
        return torch.empty_like(pattern, dtype=dtype, device="cpu")
