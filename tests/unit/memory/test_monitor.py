import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm_accelerate.memory import monitor
from glm_accelerate.memory.monitor import (
    Holder,
    Monitor,
    crowded,
    free_on,
    others_on,
    ran_out,
    resident,
    rows_about,
)

GIB = 1 << 30
MIB = 1 << 20


def test_drift_is_told_once_and_only_beyond_the_margin() -> None:
    watched = Monitor(predicted=10 * GIB, cure="memory.recompute=blocks")
    assert watched.drift(1, 9 * GIB) is None
    assert watched.drift(2, int(10.4 * GIB)) is None
    assert watched.drift(3, 12 * GIB) == (
        "step 3 needed 12 GiB at its most, 20% more than the 10 GiB that the plan had said "
        "(likely memory that is free in pieces too small, or other libraries of this process)"
    )
    assert watched.drift(4, 20 * GIB) is None


def test_running_out_is_told_with_all_that_is_needed_to_go_on() -> None:
    watched = Monitor(predicted=10 * GIB, cure="train.micro_tokens=1024")
    others = [Holder(pid, f"program{pid}", GIB) for pid in range(1, 6)]
    said = str(watched.exhausted(80, [12, 4096], 11 * GIB, others))
    assert said == (
        "out of memory in step 80, 2 samples of 12 to 4,096 tokens: 11 GiB were in use, the plan had said "
        "10 GiB, others held program1 (process 1) 1 GiB, program2 (process 2) 1 GiB, "
        "program3 (process 3) 1 GiB and 2 more (train.micro_tokens=1024 goes on from the last checkpoint)"
    )
    assert "others" not in str(watched.exhausted(80, [12], 11 * GIB, []))


def test_what_running_out_looks_like() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert ran_out(caught.value)
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert ran_out(MemoryError())
    assert not ran_out(RuntimeError("shape mismatch"))
    assert not ran_out(ValueError("can't allocate memory"))


def test_a_crowded_device_is_told() -> None:
    others = [Holder(7, "python3", 3 * GIB), Holder(8, "Xorg", MIB)]
    said = crowded(others, "cuda", 24 * GIB)
    assert said == "other processes hold 3 GiB of 24 GiB: python3 (process 7) 3 GiB, Xorg (process 8) 1 MiB"
    assert crowded(others, "cuda", 80 * GIB) is None
    assert crowded(others, "cpu", 24 * GIB) is None  # half of it, there
    assert crowded([], "cuda", 24 * GIB) is None


def test_rows_of_nvidia_smi_about_one_gpu() -> None:
    table = "GPU-a1, 12, /usr/bin/python3, 2048\nGPU-b2, 13, x, 1\nGPU-a1, 14, [N/A], [N/A]\nno devices\n"
    assert rows_about(table, "a1") == [Holder(12, "python3", 2 * GIB)]
    assert rows_about("", "a1") == []


def test_processes_of_a_host(tmp_path: Path) -> None:
    for pid, text in {
        "5": "Name:\t训练\nVmRSS:\t  2048 kB\n",
        "6": "Name:\tkthreadd\n",
        "self": "Name: x",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "status").write_text(text, encoding="utf-8")
    (tmp_path / "7").mkdir()  # it has ended
    assert resident(tmp_path) == [Holder(5, "训练", 2 * MIB)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_of_somebody_else_is_found_here_and_ours_are_not(
    spawn: Callable[..., subprocess.Popen[str]],
) -> None:
    held = "held = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
    made = [
        spawn(
            [sys.executable, "-c", held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=apart,
        )
        for apart in (True, False)
    ]
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        found = {one.pid: one for one in others_on(torch.device("cpu"))}
        assert found[made[0].pid].bytes > 64 * MIB
        assert made[1].pid not in found
        assert os.getpid() not in found
    finally:
        for process in made:
            process.communicate("\n")


def test_a_process_that_only_the_driver_knows_may_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container nvidia-smi may list processes by the numbers that they have outside of it."""
    outside = 1 + int(Path("/proc/sys/kernel/pid_max").read_text())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a1"))
    monkeypatch.setattr(monitor, "_driver_table", lambda _: f"GPU-a1, {outside}, python3, 2048\n")
    assert others_on(torch.device("cuda:0")) == []
    monkeypatch.setattr(monitor, "_driver_table", lambda _: "GPU-a1, 1, init, 2048\n")
    assert others_on(torch.device("cuda:0")) == [Holder(1, "init", 2 * GIB)]


def test_what_is_free_on_a_gpu_is_asked_of_its_driver_then_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(monitor, "_driver_table", lambda _: "GPU-b2, 9\nGPU-a1, 2048\n")
    assert free_on(torch.device("cuda:0")) == 2 * GIB
    for said in ("", "GPU-a1, [N/A]\n", "no devices were found\n"):
        monkeypatch.setattr(monitor, "_driver_table", lambda _, said=said: said)
        assert free_on(torch.device("cuda:0")) == 5 * GIB


def test_without_a_driver_nobody_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert monitor._driver_table(monitor.HOLDERS) == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n/bin/sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(monitor, "PATIENCE", 0.2)
    assert monitor._driver_table(monitor.HOLDERS) == ""
    tool.write_text("#!/bin/sh\necho 'GPU-1, 2, p, 3'\n")
    assert monitor._driver_table(monitor.HOLDERS) == "GPU-1, 2, p, 3\n"


def test_holes_between_kernels_are_given_back_before_a_larger_pass_alone() -> None:
    watched = Monitor(predicted=1000, cure="")
    assert not watched.fragments(512, 800)  # there is room
    assert watched.fragments(1024, 990)
    assert not watched.fragments(1024, 990)  # the same again finds its own places
    assert not watched.fragments(512, 990)
