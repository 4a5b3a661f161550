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
    with pytest.raises(FrozenInstanceError):
        found.count = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bf16_on_a_cpu_is_what_its_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    text = Path("/proc/cpuinfo").read_text()
    expected = re.search(r"\b(avx512_bf16|amx_bf16|bf16|svebf16)\b", text) is not None
    assert detect().bf16 is expected or torch.cuda.is_available()


GB = 10**9
SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int = 0, idle: int = 0) -> Path:
    """A control group's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {idle}\nactive_file 9\n")
    return folder


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """A host on which plenty is free."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {10**9} kB\nMemAvailable: {10**9 // 2} kB\n")
    return file


@pytest.mark.parametrize("names", [SECOND, FIRST])
def test_what_a_container_uses_already_is_not_free(
    tmp_path: Path, meminfo: Path, names: tuple[str, str, str]
) -> None:
    inner = group(tmp_path / "inner", names, GB, GB * 7 // 8, GB // 4)
    assert host_memory(meminfo, [inner]) == (GB, GB * 3 // 8)
    assert host_memory(meminfo, [group(inner, names, GB, 2 * GB)]) == (GB, 0)


def test_the_tightest_limit_around_a_process_holds(tmp_path: Path, meminfo: Path) -> None:
    whole, free = host_memory(meminfo, [])
    unlimited = group(tmp_path / "inner", SECOND, "max", GB)
    assert host_memory(meminfo, [unlimited, tmp_path / "nothing"]) == (whole, free)
    around = group(tmp_path / "around", SECOND, GB, GB // 2)
    shared = group(tmp_path / "shared", SECOND, GB * 3 // 4, GB // 8)
    assert host_memory(meminfo, [unlimited, around, shared]) == (GB * 3 // 4, GB // 2)


def test_the_host_may_have_less_than_a_container_allows(tmp_path: Path, meminfo: Path) -> None:
    meminfo.write_text("MemAvailable: 1000 kB\n")
    assert host_memory(meminfo, [group(tmp_path / "inner", SECOND, GB)]) == (GB, 1024_000)


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
