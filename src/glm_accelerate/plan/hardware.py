"""What this machine has to train with, as plain facts. Looking costs a context on a GPU, no more."""

from dataclasses import dataclass

import torch

from glm_accelerate.runtime.device import current_device, device_kind
from glm_accelerate.runtime.devices.nvidia import driver_version, torch_built_for
from glm_accelerate.runtime.env import cores
from glm_accelerate.runtime.host import has_tiles, host_memory


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. On a CPU, the device's memory is the host's."""

    device: str  # its kind, as torch calls it
    name: str
    count: int
    memory_bytes: int  # of one device
    free_bytes: int
    cores: int
    host_bytes: int
    bf16: bool  # whether bfloat16 products are done in hardware
    toolkit: str | None = None  # release of CUDA that torch was built for
    driver: str | None = None  # NVIDIA's, also where torch cannot use it
    threads: int = 0  # with which one process computes on the CPU; 0: as many as there are cores
    core_products: float = 0.0  # a second, of one core as measured in training; 0: not measured
    tiles: bool = False  # whether a CPU multiplies bfloat16 in tiles (AMX)
    assumed: bool = False  # not this machine: only its device is known

    @property
    def kind(self) -> str:
        """What people call such a device."""
        return device_kind(self.device).label or self.device.upper()


def detect() -> Hardware:
    """The machine that this process runs on; with several GPUs, the current one speaks for all."""
    record = current_device()
    on_cpu, (free, total) = record.kind == "cpu", record.memory()
    return Hardware(
        record.kind,
        record.name(),
        record.module().device_count(),
        total,
        free,
        cores(),
        host_memory()[0],
        record.bfloat16(),
        torch_built_for(),
        driver_version(),
        threads=torch.get_num_threads() if on_cpu else 0,
        tiles=on_cpu and has_tiles(),
    )
