import os
import re
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from glm_accelerate.plan.hardware import detect


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
