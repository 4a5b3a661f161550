import os
import sys
from pathlib import Path

import pytest

from glm_accelerate.runtime.env import cache_root, compiler, cores, offline, visible_devices


def test_cache_root_by_rank_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", "~/own")
    assert cache_root() == Path("/h/own")
    monkeypatch.delenv("GLM_ACCELERATE_CACHE")
    assert cache_root() == Path("/x/glm-accelerate")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path("/h/.cache/glm-accelerate")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_offline(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("GLM_ACCELERATE_OFFLINE", value)
    assert offline() is expected
    monkeypatch.setenv("GLM_ACCELERATE_OFFLINE", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert offline() is expected


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= cores() <= len(before)


def test_what_is_not_set_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CXX", "")
    assert (visible_devices(), compiler()) == (None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CXX", "mycc")
    assert (visible_devices(), compiler()) == ("", "mycc")
