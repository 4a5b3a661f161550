import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm_accelerate.memory.monitor import Monitor, crowded, others_on, ran_out
from glm_accelerate.runtime.devices import nvidia
from glm_accelerate.runtime.host import Holder

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
    for pid, found in ((outside, []), (1, [Holder(1, "init", 2 * GIB)])):
        rows = [["GPU-a1", str(pid), "init", "2048"]]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a1"))
        monkeypatch.setattr(nvidia, "driver_table", lambda *_, rows=rows: rows)
        assert others_on(torch.device("cuda:0")) == found


def test_holes_between_kernels_are_given_back_before_a_larger_pass_alone() -> None:
    watched = Monitor(predicted=1000, cure="")
    assert not watched.fragments(512, 800)  # there is room
    assert watched.fragments(1024, 990)
    assert not watched.fragments(1024, 990)  # the same again finds its own places
    assert not watched.fragments(512, 990)
