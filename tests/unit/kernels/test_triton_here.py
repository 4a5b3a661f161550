"""What Triton lacks on a machine is a reason, never an error."""

import sysconfig
from pathlib import Path

import pytest
import torch

from glm_accelerate.kernels.compiled import missing
from glm_accelerate.kernels.triton_here import lacking, no_triton


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_where_no_kernel_runs_there_is_a_reason() -> None:
    lack = no_triton()
    assert lack is not None
    assert lack[0].startswith("Triton")
    assert missing("cuda") == lack[0]


def test_a_missing_compiler_is_named_and_so_are_missing_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert lacking() == ("Triton needs a C compiler (gcc)", "apt-get install gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "/no/such/compiler")  # Triton takes it unseen
    assert lacking() == ("Triton needs a C compiler (/no/such/compiler)", "apt-get install gcc")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert lacking() == ("Triton needs Python's headers (Python.h)", "apt-get install python3-dev")
    (tmp_path / "Python.h").touch()
    assert lacking() is None
