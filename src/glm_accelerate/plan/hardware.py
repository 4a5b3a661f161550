"""What a machine has to train with, as plain facts: this one, and devices that a run can be planned for
without having one, by name or by the size of their memory.
"""

import difflib
from dataclasses import dataclass

import torch

from glm_accelerate.runtime.device import current_device, device_kind
from glm_accelerate.runtime.devices.nvidia import Nvidia, driver_version, torch_built_for
from glm_accelerate.runtime.env import cores
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.host import has_tiles, host_memory
from glm_accelerate.runtime.words import read_amount

GIB = 1 << 30
HOST_CORES, HOST_BYTES = 8, 64 * GIB  # beside each device of a machine that is not here


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


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Facts of a device. Products, bandwidth and link are those of its maker, products dense with float32
    sums.
    """

    name: str
    kind: str  # as torch calls it
    memory: int  # bytes that a program sees
    products: float | None  # floating-point operations a second in bfloat16 (V100: float16); None: unknown
    bandwidth: float | None  # bytes a second of its memory
    link: float = 0.0  # ... one way to others of its node, all lanes together; 0: unknown
    wire: str = "PCIe"
    reached: float = 0.5  # part of its products that whole blocks of matrix products reach
    bf16: bool = True
    sure: bool = True  # False: from memory or hearsay, and shown as assumed


# Ampere, Hopper and Ada: chosen by rows that benchmarks/layouts/published.py names; the others are assumed.
VOLTA, AMPERE, ADA, HOPPER, BLACKWELL = 0.6, 0.75, 0.85, 0.51, 0.51
# Gigabytes a second one way: NVLink by generation, PCIe by 16 lanes. GeForce cards read each other's memory
# through their host's, so that everything travels twice.
NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5, NVLINK_CUT = 150, 300, 450, 900, 200
PCIE_4, PCIE_5 = 32, 64
BY_HOST = 0.5


def _nvidia(
    name: str,
    gib: float,
    tera: float,
    gigabytes: float,
    link: float,
    reached: float,
    *,
    bf16: bool = True,
    sure: bool = True,
) -> DataSheet:
    wire = "PCIe" if link <= PCIE_5 else "NVLink"
    speeds = tera * 1e12, gigabytes * 1e9, link * 1e9
    return DataSheet(name, Nvidia.kind, int(gib * GIB), *speeds, wire, reached, bf16, sure)


# Memory: what torch's own out-of-memory messages call the total capacity, which is below the name's.
# Products, bandwidth and links: NVIDIA's data sheets and architecture whitepapers (Volta, Ampere, Ada,
# Hopper, Blackwell), of the SXM form where there is one; consumer cards at half rate, as float32 sums get.
DEVICES = (
    _nvidia(
        "RTX 3060", 11.76, 25.5, 360, PCIE_4 * BY_HOST, AMPERE, sure=False
    ),  # twice its float32, as on the 3090
    _nvidia("RTX 3090", 23.69, 71, 936, PCIE_4 * BY_HOST, AMPERE),
    _nvidia("RTX 4090", 23.64, 165.2, 1008, PCIE_4 * BY_HOST, ADA),
    _nvidia("RTX 5090", 31.36, 209.5, 1792, PCIE_5 * BY_HOST, BLACKWELL),
    _nvidia("V100 16GB", 15.77, 125, 900, NVLINK_2, VOLTA, bf16=False),
    _nvidia("V100 32GB", 31.74, 125, 900, NVLINK_2, VOLTA, bf16=False),
    _nvidia("A100 40GB", 39.39, 312, 1555, NVLINK_3, AMPERE),
    _nvidia("A100 80GB", 79.15, 312, 2039, NVLINK_3, AMPERE),
    _nvidia("A800 80GB", 79.15, 312, 2039, NVLINK_CUT, AMPERE),
    _nvidia("A30", 23.5, 165, 933, PCIE_4, AMPERE, sure=False),
    _nvidia("H100", 79.1, 989.4, 3350, NVLINK_4, HOPPER),
    _nvidia("H100 PCIe", 79.1, 756, 2000, PCIE_5, HOPPER),
    _nvidia("H100 NVL", 93.0, 835, 3900, PCIE_5, HOPPER, sure=False),  # NVLink between two of them
    _nvidia("H800", 79.1, 989.4, 3350, NVLINK_CUT, HOPPER),
    _nvidia("H200", 139.8, 989.4, 4800, NVLINK_4, HOPPER),
    _nvidia("B200", 178.0, 2250, 8000, NVLINK_5, BLACKWELL, sure=False),
    _nvidia("H20", 95.0, 148, 4000, NVLINK_4, AMPERE, sure=False),  # few products for its power
    _nvidia("L4", 22.0, 121, 300, PCIE_4, ADA, sure=False),
    _nvidia("L20", 44.4, 119.5, 864, PCIE_4, ADA, sure=False),
    _nvidia("L40S", 44.4, 362, 864, PCIE_4, ADA),
    # 64 GB, the B3 of four kinds; seven links of 28 GB/s
    DataSheet("Ascend 910B", "npu", 61 * GIB, 313e12, 1.6e12, 196e9, "HCCS", sure=False),
    DataSheet("MLU370-X4", "mlu", 23 * GIB, 96e12, 307e9, PCIE_4 * 1e9, sure=False),  # 24 GB
    DataSheet("MLU370-X8", "mlu", 46 * GIB, 96e12, 614e9, 100e9, "MLU-Link", sure=False),  # 48 GB
    DataSheet("MLU590", "mlu", 78 * GIB, 314e12, 2e12, 186e9, "MLU-Link", sure=False),  # 80 GB
)
ALSO = {"A100": "A100 80GB", "V100": "V100 16GB", "RTX 3060 12GB": "RTX 3060", "MLU370": "MLU370-X8",
        "910B": "Ascend 910B"}  # fmt: skip
MAKERS = ("nvidia", "geforce", "tesla", "huawei", "cambricon")
OTHERS = {"Ti", "SUPER"}  # behind a name make it another card
THIS = "this"


def find_device(asked: str) -> DataSheet:
    """The device of a name, however it is spaced, or of a bare amount of memory."""
    size = read_amount(asked)
    if size is not None:
        return DataSheet(f"a device of {asked.strip()}", Nvidia.kind, size, None, None)
    names = {_plain(one.name): one for one in DEVICES}
    names |= {_plain(short): names[_plain(name)] for short, name in ALSO.items()}
    wanted = _plain(asked)
    if wanted in names:
        return names[wanted]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    there = ", ".join([THIS, *(one.name for one in DEVICES)])
    hint = f"did you mean `{names[close[0]].name}`? " if close else ""
    raise UserError(
        f"no device called `{asked}` is known", cure=f"{hint}there are {there}; or say its memory: 12GiB"
    )


def known(name: str) -> DataSheet | None:
    """The device that a driver's name means, by whole words, the most of them: an H200 is no H20."""
    words = set(name.replace("-", " ").split())
    if words & OTHERS:
        return None
    found = [one for one in DEVICES if set(one.name.replace("-", " ").split()) <= words]
    return max(found, key=lambda one: len(one.name), default=None)


def as_hardware(device: DataSheet, count: int) -> Hardware:
    """A machine that has so many of them and nothing else on them. Its host is assumed."""
    return Hardware(
        device=device.kind,
        name=device.name,
        count=count,
        memory_bytes=device.memory,
        free_bytes=device.memory - device_kind(device.kind).context_bytes,
        cores=count * HOST_CORES,
        host_bytes=count * HOST_BYTES,
        bf16=device.bf16,
        assumed=True,
    )


def _plain(name: str) -> str:
    words = name.casefold().replace("-", " ").split()
    return "".join(word for word in words if word not in MAKERS)
