"""What can be checked without a GPU: how its driver's tables are read, and what happens without them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.devices import nvidia
from glm_accelerate.runtime.devices.nvidia import HOLDERS, NoAnswer, driver_table, driver_version, rows_about
from glm_accelerate.runtime.host import Holder

GIB = 1 << 30
CARD = device_of("cuda:0")


def rows(*lines: str) -> list[list[str]]:
    return [line.split(", ") for line in lines]


def test_processes_on_one_gpu() -> None:
    table = rows(
        "GPU-a1, 12, /usr/bin/python3, 2048", "GPU-b2, 13, x, 1", "GPU-a1, 14, [N/A], [N/A]", "no devices"
    )
    assert rows_about(table, "a1") == [Holder(12, "python3", 2 * GIB)]
    assert rows_about([], "a1") == []


def test_what_is_free_on_a_gpu_is_asked_of_its_driver_then_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(nvidia, "driver_table", lambda *_: rows("GPU-b2, 9", "GPU-a1, 2048"))
    assert CARD.unclaimed() == 2 * GIB
    for table in ([], rows("GPU-a1, [N/A]"), rows("no devices were found")):
        monkeypatch.setattr(nvidia, "driver_table", lambda *_, table=table: table)
        assert CARD.unclaimed() == 5 * GIB


def test_a_driver_that_is_not_there_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia, "PATIENCE", 0.2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a1"))
    assert driver_table(HOLDERS, 0.2) == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    tool.chmod(0o755)
    with pytest.raises(NoAnswer, match="does not answer"):
        driver_table(HOLDERS, 0.2)
    assert CARD.holders() == []
    tool.write_text("#!/bin/sh\necho no devices; exit 6\n")
    with pytest.raises(NoAnswer, match="no devices"):
        driver_table(HOLDERS, 20)
    tool.write_text("#!/bin/sh\necho 'GPU-1, 2, p, 3'\n")
    assert driver_table(HOLDERS, 20) == [["GPU-1", "2", "p", "3"]]


def test_memory_that_the_system_does_not_lock_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL2, containers with a low limit: CUDA's own message stands for it."""

    class Refusing:
        @staticmethod
        def cudaHostRegister(place: int, size: int, flags: int) -> int:
            return 801

        @staticmethod
        def cudaGetErrorString(error: int) -> str:
            return {801: "operation not supported"}[error]

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    card = nvidia.Nvidia(torch.device("cpu"))
    assert card.lock_pages(torch.zeros(8)) == "operation not supported"
    monkeypatch.setattr(Refusing, "cudaHostRegister", lambda *_: 0)
    assert card.lock_pages(torch.zeros(8)) is None


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
    monkeypatch.setattr(nvidia, "DRIVER", file)
    assert driver_version() is None
    file.write_text(text)
    assert driver_version() == version
