import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm_accelerate.kernels.native import build
from glm_accelerate.runtime import host
from glm_accelerate.runtime.host import (
    Holder,
    host_holders,
    host_memory,
    peak_resident,
    reset_peak_resident,
)

MIB = 1 << 20
GB = 10**9
SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
XEON = "processor : 0\nflags : fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n\nprocessor : 1\n"
NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


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


def test_processes_of_a_host(tmp_path: Path) -> None:
    for pid, text in {
        "5": "Name:\t训练\nVmRSS:\t  2048 kB\n",
        "6": "Name:\tkthreadd\n",
        "self": "Name: x",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "status").write_text(text, encoding="utf-8")
    (tmp_path / "7").mkdir()  # it has ended
    assert host_holders(tmp_path) == [Holder(5, "训练", 2 * MIB)]


def test_peak_on_a_cpu_is_seen_after_the_memory_is_gone() -> None:
    anew = reset_peak_resident()
    before = peak_resident()
    block = torch.ones(256 * MIB, dtype=torch.uint8)
    del block
    grown = peak_resident() - before
    assert grown <= 300 * MIB
    if anew:
        assert grown >= 200 * MIB
        reset_peak_resident()
        assert peak_resident() - before < 100 * MIB


def test_memory_that_was_given_back_is_there_again() -> None:
    """In a process of its own: how many pages the system has to clear when tensors come and go."""
    code = """
import resource, torch
from glm_accelerate.runtime.host import keep_freed_memory
keep_freed_memory()
def step():
    return len([torch.ones(1_500_000) for _ in range(10)])
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 15_000  # as shipped twice as many


def test_gathered_weights_leave_no_holes_between_what_stays() -> None:
    """In a process of its own: MiB that stay in memory of 256 that came and went."""
    code = """
import torch
from glm_accelerate.runtime.host import keep_freed_memory, resident
keep_freed_memory(gathers={})
before = resident()
both = [(torch.ones(2**21), torch.ones(2**12)) for _ in range(32)]
stays = [small for _, small in both]
del both
print((resident() - before) >> 20)
"""

    def kept(gathers: bool) -> int:
        words = [sys.executable, "-c", code.format(gathers)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert kept(False) > 200
    assert kept(True) < 50


@pytest.mark.parametrize(
    ("text", "said", "bfloat16", "tiles"),
    [
        (XEON, {}, True, True),
        (XEON, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False),
        (XEON, {"DNNL_MAX_CPU_ISA": "avx512_core"}, False, False),
        (XEON, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, False),
        (XEON, {"ATEN_CPU_CAPABILITY": "avx2"}, False, False),
        (XEON, {"ATEN_CPU_CAPABILITY": "avx512"}, True, True),
        ("processor : 0\nFeatures : fp asimd bf16\n", {}, True, False),
        ("processor : 0\nflags : fpu avx2\n", {}, False, False),
    ],
)
def test_flags_in_use(
    text: str,
    said: dict[str, str],
    bfloat16: bool,
    tiles: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert host.has_bfloat16() is bfloat16
    assert ("amx_tile" in host.processor_flags()) is tiles
    if not bfloat16 or "Features" in text:
        assert build.lacking() == "no bfloat16 products (AVX-512 BF16 or AMX) in this processor"
