import os
import re
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from glm_accelerate.plan import hardware
from glm_accelerate.plan.hardware import detect, driver_version, host_memory


def test_this_machine() -> None:
    found = detect()
    assert found.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found.count >= 1
    assert found.name
    assert 0 < found.free_bytes <= found.memory_bytes
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.host_bytes > 1 << 28
    assert found.torch_version == torch.__version__
    with pytest.raises(FrozenInstanceError):
        found.count = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bf16_on_a_cpu_is_what_its_flags_say() -> None:
    text = Path("/proc/cpuinfo").read_text()
    expected = re.search(r"\b(avx512_bf16|amx_bf16|bf16|svebf16)\b", text) is not None
    assert detect().bf16 is expected or torch.cuda.is_available()


def test_host_memory_obeys_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "LIMITS", (limit,))
    limit.write_text("max\n")
    whole, _ = host_memory()
    limit.write_text(f"{1 << 26}\n")
    assert host_memory() == (1 << 26, 1 << 26)
    assert whole > 1 << 26


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release\nGCC 12.3.0", "580.65"),
        ("something else", None),
    ],
)
def test_driver_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(hardware, "DRIVER", file)
    assert driver_version() is None
    file.write_text(text)
    assert driver_version() == version
