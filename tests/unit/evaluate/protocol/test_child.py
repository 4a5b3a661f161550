"""What can be said of an evaluator before it starts. The rest is in tests/system/test_evaluator.py."""

from glm_accelerate.evaluate.protocol.child import lacking_memory
from glm_accelerate.runtime.devices.nvidia import rows_about

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
