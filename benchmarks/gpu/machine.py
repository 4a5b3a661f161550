"""Where it runs: names, versions, and what the device can do."""

import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec

import torch

from benchmarks.gpu.cases import peak_seconds
from benchmarks.gpu.finding import Finding
from glm_accelerate.bench.judge import bandwidth
from glm_accelerate.bench.peak import peak

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "flash_attn",
    "liger_kernel",
)


def machine(device: torch.device, tiny: bool) -> Iterator[Finding]:
    versions = {name: version(name) for name in PACKAGES if find_spec(name)}
    best = peak(device, "bfloat16", peak_seconds(tiny))
    gpu = device.type == "cuda"
    figures = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "memory_bytes": torch.cuda.mem_get_info(device)[1] if gpu else None,
        "python": platform.python_version(),
        "versions": versions,
        "products_per_second": best.measured,
        "data_sheet": best.data_sheet,
        "copied_bytes_per_second": bandwidth(device),
    }
    yield Finding("machine", None, figures)
