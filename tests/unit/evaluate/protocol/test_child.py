"""What can be said of an evaluator before it starts. The rest is in tests/system/test_evaluator.py."""

import os
import sys
from pathlib import Path

import pytest

from glm_accelerate.evaluate.protocol.child import EvaluatorProcess, lacking_memory, lacking_resource
from glm_accelerate.runtime.devices.nvidia import rows_about
from glm_accelerate.runtime.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores and memory as Linux tells them")


def test_what_is_there_can_be_had() -> None:
    assert lacking_resource(threads=1, cores=None, host_bytes=0) is None
    assert lacking_resource(threads=1, cores=[min(os.sched_getaffinity(0))], host_bytes=1 << 20) is None


# As nvidia-smi prints compute processes: gpu_uuid, pid, process_name, used_memory [MiB]. Written by hand from
# its documentation: what is done with it has not run beside a real GPU yet.
TABLE = """\
GPU-5f1b4b7e-0d3c-4f4a-9a39-2d6b9c1d7a10, 4242, /opt/conda/bin/python3.12, 61440
GPU-5f1b4b7e-0d3c-4f4a-9a39-2d6b9c1d7a10, 4300, /usr/bin/ollama, 512
GPU-c0ffee00-1111-2222-3333-444455556666, 77, python, 79000
GPU-c0ffee00-1111-2222-3333-444455556666, 78, [Not Found], [N/A]
"""
GIB = 1 << 30


def test_a_spare_device_that_others_have_filled() -> None:
    others = rows_about(
        [line.split(", ") for line in TABLE.splitlines()], "5f1b4b7e-0d3c-4f4a-9a39-2d6b9c1d7a10"
    )
    assert lacking_memory("cuda:3", 19 * GIB, 39 * GIB // 2, others) is None
    assert lacking_memory("cuda:3", 20 * GIB, 39 * GIB // 2, others) == (
        "it needs 20 GiB of cuda:3, 19.5 GiB are free, as others hold "
        "python3.12 (process 4242) 60 GiB, ollama (process 4300) 512 MiB"
    )
    # Somebody in another container: nvidia-smi names no process.
    assert lacking_memory("cuda:3", 20 * GIB, 2 * GIB, []) == "it needs 20 GiB of cuda:3, 2 GiB are free"
    assert lacking_resource(threads=1, cores=None, host_bytes=0, device="cpu", device_bytes=10**15) is None


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    assert "core 4000 " in (lacking_resource(threads=1, cores=[core, 4000], host_bytes=0) or "")
    assert lacking_resource(threads=2, cores=[core], host_bytes=0) == "2 threads on 1 cores"
    assert "909 TiB" in (lacking_resource(threads=1, cores=None, host_bytes=10**15) or "")
    with pytest.raises(UserError, match="inline") as raised:
        EvaluatorProcess(tmp_path, device="cpu", threads=1, cores=[4000], host_bytes=0)
    assert "core 4000" in raised.value.what
    assert not (tmp_path / "evals").exists()
