from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.cli import doctor
from glm_accelerate.cli.doctor import driver, examine, held_by, memory
from glm_accelerate.cli.main import main
from glm_accelerate.plan.hardware import Hardware

GPU = Hardware("cuda", "NVIDIA Test", 2, 24 << 30, 23 << 30, 8, 64 << 30, True, "12.6", "535.104.05")
CPU = Hardware("cpu", "Test CPU", 1, 8 << 30, 6 << 30, 4, 8 << 30, True, None, None)


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (GPU, "good", "driver 535.104.05, torch built for CUDA 12.6"),
        (CPU, "good", "no NVIDIA driver"),
        (replace(GPU, driver_version="525.59"), "bad", "too old for CUDA 12.6"),
        (replace(GPU, driver_version="525.60"), "good", ""),
        (replace(GPU, cuda_version="13.0"), "bad", "too old for CUDA 13.0"),
        (replace(GPU, driver_version=None), "good", "driver unknown"),
        (replace(CPU, driver_version="580.1"), "bad", "torch is a CPU build"),
        (replace(CPU, cuda_version="12.6"), "note", "no driver is loaded"),
        (replace(CPU, cuda_version="12.6", driver_version="580.1"), "bad", "torch sees no GPU"),
    ],
)
def test_the_driver_is_held_against_the_build(machine: Hardware, state: str, words: str) -> None:
    finding = driver(machine)
    assert finding.state == state
    assert words in finding.found
    assert bool(finding.cure) == (state == "bad")


def test_hidden_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = driver(replace(CPU, cuda_version="12.6", driver_version="580.1"))
    assert finding.cure == "CUDA_VISIBLE_DEVICES is ``"


def test_who_holds_the_memory() -> None:
    assert memory(GPU, []).state == "good"
    finding = memory(replace(GPU, free_bytes=3 << 30), ["python (process 7, 20000 MiB)"])
    assert finding.state == "note"
    assert finding.found == "3.0 of 24.0 GiB free; held by python (process 7, 20000 MiB)"
    assert memory(replace(CPU, free_bytes=1), []).state == "good"


def test_the_table_of_nvidia_smi() -> None:
    assert held_by("123, /usr/bin/python, 4096\n77, [N/A], 12\n") == [
        "/usr/bin/python (process 123, 4096 MiB)",
        "[N/A] (process 77, 12 MiB)",
    ]
    assert held_by("") == []


def test_every_finding_that_is_not_good_has_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": "sink `none`"})
    findings = {finding.name: finding for finding in examine(replace(CPU, bf16=False), [])}
    assert findings["C++ compiler"].cure == "apt-get install g++"
    assert findings["no-such-package"].cure == 'pip install "glm-accelerate[no-such-package]"'
    assert findings["bfloat16"].cure == "precision.compute=float32"
    assert all(finding.state == "good" or finding.cure for finding in findings.values())
    assert {"python", "torch", "transformers", "glm-accelerate", "CUDA", "device", "memory"} <= set(findings)


def test_it_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert code == (2 if any(line.startswith("mend") for line in lines) else 0)
    assert any(line.split()[1:2] == ["torch"] for line in lines)


def test_a_wrong_config_is_named_before_anything_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nothere.yaml"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "error: nothere.yaml: cannot be read: No such file or directory\n")


def test_a_gpu_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "PATIENCE", 0.2)
    assert doctor._holders() == ["unknown: nvidia-smi does not answer"]
