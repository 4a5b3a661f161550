"""What a run has to know about its device, as one record: facts about its kind, and calls about one device.

`Device` calls torch's module for the kind (torch.cuda, torch.npu, ...): these are alike. Each kind is a class
with its differences: `Cpu` here, each other one in a file beside this one.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from glm_accelerate.runtime.host import (
    Holder,
    cpu_name,
    has_bfloat16,
    host_holders,
    host_memory,
    peak_resident,
    reset_peak_resident,
)


@dataclass(frozen=True)
class Device:
    """One device. The class holds facts about its kind, also for plans for other machines."""

    device: torch.device

    kind: ClassVar[str]  # torch's name of it
    label: ClassVar[str] = ""  # people's name, where it is not torch's in capitals
    software: ClassVar[str] = ""  # an error that begins with its name means that the device computes no more
    collectives: ClassVar[str] = "gloo"  # what ranks talk through
    context_bytes: ClassVar[int] = 0  # assumed: its driver's and its kernels', outside of torch's allocator
    process_bytes: ClassVar[int] = 0  # assumed: its libraries' share of a process's memory on the host
    float16: ClassVar[bool] = False  # multiplied in hardware, also where bfloat16 is not
    wide_products: ClassVar[bool] = False  # of bfloat16 and float16, as float32, at no cost
    gpu_kernels: ClassVar[bool] = False  # Triton's and flash attention are written for it
    streams: ClassVar[bool] = True  # copies from pinned memory run beside computation
    deterministic: ClassVar[bool] = False  # sums in the same order each time, unasked
    out_of_memory: ClassVar[tuple[str, ...]] = ()  # in errors that have no type of their own
    profiled: ClassVar[tuple[ProfilerActivity, ...]] = (ProfilerActivity.CPU,)

    @classmethod
    def module(cls) -> Any:
        """torch's module, with streams, events and all that is not named here."""
        return torch.get_device_module(cls.kind)

    @classmethod
    def empty_cache(cls) -> None:
        """Give back unused memory of torch's allocator, on every device that it has used."""
        if cls.streams:
            cls.module().empty_cache()

    def make_current(self) -> None:
        """Kernels and streams run on the current device, whatever device their tensors are on."""
        if str(self.device) != self.kind and self.module().is_available():
            self.module().set_device(self.device)

    def synchronize(self) -> None:
        """Wait until it has done all its work."""
        self.module().synchronize(self.device)

    def clock(self) -> float:
        """Seconds, once all its work is done."""
        self.synchronize()
        return time.perf_counter()

    def mark(self) -> Any:
        """Now, in the order of its work, without waiting."""
        event = self.module().Event(enable_timing=True)
        event.record()
        return event

    def between(self, begun: Any, ended: Any) -> float:
        """Seconds from one mark to another, when both are past."""
        return begun.elapsed_time(ended) / 1e3

    def name(self) -> str:
        return self.module().get_device_name(self.device)

    def properties(self) -> Any:
        """What torch knows about it: memory, processors."""
        return self.module().get_device_properties(self.device)

    def capability(self) -> tuple[int, int]:
        """NVIDIA's name for the generation: (8, 0) is an A100, (9, 0) an H100 or H200."""
        return (0, 0)

    def flash_attention(self) -> bool:
        """Whether torch was built with it."""
        return False

    def bfloat16(self) -> bool:
        """Whether the hardware multiplies it."""
        return self.module().is_bf16_supported()

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""
        return self.module().mem_get_info(self.device)

    def unclaimed(self) -> int:
        """Bytes that no process holds, in other containers either."""
        return self.memory()[0]

    def holders(self) -> list[Holder]:
        """Processes that hold memory of it, as far as its driver names them."""
        return []

    def cap_memory(self, most: int) -> None:
        """Limit this process's tensors to `most` bytes."""
        if self.streams:
            _, whole = self.memory()
            self.module().set_per_process_memory_fraction(min(1.0, max(0, most) / whole), self.device)

    def peak(self) -> int:
        """The most bytes in use since `reset_peak`: tensors, on a CPU the whole process."""
        return self.module().max_memory_allocated(self.device)

    def reset_peak(self) -> bool:
        """Measure from here on. False where that is impossible: the peak counts from the process's start."""
        self.module().reset_peak_memory_stats(self.device)
        return True

    def lock_pages(self, memory: Tensor) -> str | None:
        """Keep its pages in place, so that the device copies into them by itself. Why that fails, or None."""
        return f"{self.kind} has no call for it"

    def unlock_pages(self, memory: Tensor) -> None:
        """End `lock_pages`."""

    def fork_random(self) -> AbstractContextManager[None]:
        """Numbers drawn inside leave the generators as they were."""
        return torch.random.fork_rng([self.device] if self.streams else [], device_type=self.kind)

    def random_states(self) -> list[Tensor]:
        """The states of all generators in use."""
        own = [self.module().get_rng_state(self.device)] if self.streams else []
        return [torch.get_rng_state(), *own]


class Cpu(Device):
    """A CPU, and any device without a record of its own."""

    kind: ClassVar[str] = "cpu"
    streams: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begun: float, ended: float) -> float:
        return ended - begun

    def name(self) -> str:
        return cpu_name()

    def bfloat16(self) -> bool:
        return has_bfloat16()

    def memory(self) -> tuple[int, int]:
        total, free = host_memory()
        return free, total

    def holders(self) -> list[Holder]:
        return host_holders()

    def peak(self) -> int:
        return peak_resident()

    def reset_peak(self) -> bool:
        return reset_peak_resident()
