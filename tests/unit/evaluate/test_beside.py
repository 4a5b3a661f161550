"""What can be said of an evaluator before it starts. The rest is in tests/system/test_evaluator.py."""

import os
import sys
from pathlib import Path

import pytest

from glm_accelerate.evaluate.beside import Beside, why_not
from glm_accelerate.runtime.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores and memory as Linux tells them")


def test_what_is_there_can_be_had() -> None:
    assert why_not(threads=1, cores=None, host_bytes=0) is None
    assert why_not(threads=1, cores=[min(os.sched_getaffinity(0))], host_bytes=1 << 20) is None


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    assert "core 4000 " in (why_not(threads=1, cores=[core, 4000], host_bytes=0) or "")
    assert why_not(threads=2, cores=[core], host_bytes=0) == "2 threads on 1 cores"
    assert "1000000.0 GB" in (why_not(threads=1, cores=None, host_bytes=10**15) or "")
    with pytest.raises(UserError, match="inline") as raised:
        Beside(tmp_path, device="cpu", threads=1, cores=[4000], host_bytes=0)
    assert "core 4000" in raised.value.what
    assert not (tmp_path / "evals").exists()
