from dataclasses import replace
from importlib.metadata import requires
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from glm_accelerate.cli import doctor
from glm_accelerate.cli.doctor import Finding, code, driver, examine, extra, memory
from glm_accelerate.cli.main import main
from glm_accelerate.plan.hardware import Hardware

GPU = Hardware("cuda", "NVIDIA Test", 2, 24 << 30, 23 << 30, 8, 64 << 30, True, "12.6", "535.104.05")
CPU = Hardware("cpu", "Test CPU", 1, 8 << 30, 6 << 30, 4, 8 << 30, True, None, None)


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (GPU, "good", "driver 535.104.05, torch built for CUDA 12.6"),
        (CPU, "good", "no NVIDIA driver"),
        (replace(GPU, driver="525.59"), "bad", "too old for CUDA 12.6"),
        (replace(GPU, driver="525.60"), "good", ""),
        (replace(GPU, toolkit="13.0"), "bad", "too old for CUDA 13.0"),
        (replace(GPU, driver=None), "good", "driver unknown"),
        (replace(CPU, driver="580.1"), "bad", "torch is a CPU build"),
        (replace(CPU, toolkit="12.6"), "note", "no driver is loaded"),
        (replace(CPU, toolkit="12.6", driver="580.1"), "bad", "torch sees no GPU"),
    ],
)
def test_the_driver_is_held_against_the_build(machine: Hardware, state: str, words: str) -> None:
    finding = driver(machine)
    assert finding.state == state
    assert words in finding.text
    assert bool(finding.cure) == (state == "bad")


def test_hidden_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = driver(replace(CPU, toolkit="12.6", driver="580.1"))
    assert finding.cure == "CUDA_VISIBLE_DEVICES is ``"


def test_who_holds_the_memory() -> None:
    assert memory(GPU, []).state == "good"
    finding = memory(replace(GPU, free_bytes=3 << 30), ["python (process 7, 20000 MiB)"])
    assert finding.state == "note"
    assert finding.text == "3.0 of 24.0 GiB free; held by python (process 7, 20000 MiB)"
    assert memory(replace(CPU, free_bytes=1), []).state == "good"


def test_what_listens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert {one.name: one.state for one in examine(CPU, [])}["listens"] == "good"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    finding = next(one for one in examine(CPU, []) if one.name == "listens")
    assert finding.text == "ranks, without a password, as GLOO_SOCKET_IFNAME=eth1 says"
    assert finding.cure == "unset GLOO_SOCKET_IFNAME to keep ranks of one machine to themselves"


def test_every_finding_that_is_not_good_has_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(doctor, "requires", lambda _: ['no-such-package>=1; extra == "zstd"'])
    findings = {finding.name: finding for finding in examine(replace(CPU, bf16=False), [])}
    assert findings["C++ compiler"].cure == "apt-get install g++"
    assert findings["no-such-package"].cure == 'pip install --upgrade "glm-accelerate[zstd]"'
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
    tool.write_text("#!/bin/sh\necho 'GPU-1, 123, /usr/bin/python, 4096\nGPU-1, 77, [N/A], 12'\n")
    monkeypatch.setattr(doctor, "PATIENCE", 30.0)
    assert doctor._holders() == ["/usr/bin/python (process 123, 4096 MiB)", "[N/A] (process 77, 12 MiB)"]


ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of torch 2.13 for CUDA 13.0


@pytest.mark.parametrize(
    ("capability", "arches", "state"),
    [
        ((9, 0), ARCHES, "good"),
        ((8, 9), ARCHES, "good"),  # Ada runs the code of 8.6
        ((7, 0), ARCHES, "bad"),  # V100
        ((11, 0), ARCHES, "bad"),  # 10.0 is another first number
        ((11, 0), [*ARCHES, "compute_120"], "bad"),
        ((12, 1), [*ARCHES, "compute_120"], "good"),
        ((13, 0), [*ARCHES, "compute_120"], "good"),  # compiled when it is loaded
        ((9, 0), ["sm_90a"], "good"),
        ((9, 1), ["sm_90a"], "bad"),
        ((8, 0), ["sm_86"], "bad"),
    ],
)
def test_a_card_that_torch_has_no_code_for(
    capability: tuple[int, int], arches: list[str], state: str
) -> None:
    finding = code("NVIDIA Test", capability, arches)
    assert finding.state == state
    assert bool(finding.cure) == (state == "bad")


def test_the_build_for_an_old_card_is_named() -> None:
    assert "torch for CUDA 12.6 that" in code("Tesla V100", (7, 0), ARCHES).cure
    assert "torch for CUDA 13.0 that" in code("NVIDIA B200", (10, 0), ["sm_90"]).cure
    assert "torch for CUDA 13.0 or CUDA 12.6 that" in code("Tesla T4", (7, 5), ["sm_80"]).cure
    assert "if there is one" in code("Tesla K80", (3, 7), ARCHES).cure


def test_versions_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"torchao": "0.9.1"}
    monkeypatch.setattr(doctor, "version", has.__getitem__)
    old = extra("torchao", "torchao", "0.18")
    assert (old.state, old.text) == ("note", "0.9.1, and optim.name=adamw8bit needs 0.18")
    has["torchao"] = "0.19.0.dev1+cpu"
    new = extra("torchao", "torchao", "0.18")
    assert (new.state, new.cure) == ("good", "")
    assert f"tested with {doctor.TESTED['torchao']}" in new.text


def test_what_is_said_to_be_tested_is_what_tests_run_with() -> None:
    root = Path(__file__).parents[3]
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    assert {package: pins.get(package) for package in doctor.TESTED} == doctor.TESTED
    named = [found for said in requires("glm-accelerate") or () if (found := doctor.EXTRA.fullmatch(said))]
    assert {found[3] for found in named} == {*doctor.EXTRAS, "dev"}
    assert {found[1] for found in named if found[3] != "dev"} & {*pins} <= {*doctor.TESTED}


@pytest.mark.parametrize("width", [20, 80])
def test_a_cure_can_be_copied_at_any_width(width: int) -> None:
    cure = 'pip install --upgrade "glm-accelerate[tensorboard]"'
    finding = Finding("note", "tensorboard", "not installed, needed for the sink `tensorboard` only", cure)
    console = Console(file=StringIO(), width=width)
    doctor._show([finding], console)
    assert cure in [line.strip() for line in console.file.getvalue().splitlines()]  # pyright: ignore
