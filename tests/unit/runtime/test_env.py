import os
import sys
from pathlib import Path

import pytest

from glm_accelerate.runtime import env
from glm_accelerate.runtime.env import (
    cache_root,
    compiler,
    control_groups,
    cores,
    expanded,
    launched,
    offline,
    visible_devices,
)
from glm_accelerate.runtime.errors import UserError


def test_cache_root_by_rank_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", "~/own")
    assert cache_root() == Path("/h/own")
    monkeypatch.delenv("GLM_ACCELERATE_CACHE")
    assert cache_root() == Path("/x/glm-accelerate")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path("/h/.cache/glm-accelerate")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the list of users")
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "GLM_ACCELERATE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(UserError, match=r"no home directory.*GLM_ACCELERATE_CACHE"):
        cache_root()
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", "~/own")
    with pytest.raises(UserError, match=r"no home directory.*GLM_ACCELERATE_CACHE"):
        cache_root()
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", "/own")
    assert cache_root() == Path("/own")


GIVEN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', expected 1 to 65535"),
        ({"RANK": "2"}, "RANK is '2', expected 0 to 1"),
        ({"RANK": ""}, "RANK is ''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_what_a_launcher_set_wrongly_is_named(
    changes: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**GIVEN, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        launched()


def test_who_was_launched_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    place = launched()
    assert place is not None
    assert (place.rank, place.count, place.address, place.port) == (1, 2, "here", 29500)
    monkeypatch.delenv("RANK")
    assert launched() is None


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


def test_control_groups_are_looked_up_to_the_root(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/system.slice/slurm/job_7\n")
    slurm = tmp_path / "system.slice/slurm"
    assert control_groups("memory", tmp_path, own)[:4] == [slurm / "job_7", slurm, slurm.parent, tmp_path]
    own.write_text("5:memory:/docker/a:b\n4:cpu,cpuacct:/other\n0::/\n")
    memory = tmp_path / "memory"
    wanted = [memory / "docker/a:b", memory / "docker", tmp_path, memory]
    assert control_groups("memory", tmp_path, own) == wanted
    assert control_groups("memory", tmp_path, tmp_path / "none") == [tmp_path, memory]


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_cores_follow_the_tightest_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(env, "control_groups", lambda _: [inner, tmp_path])
    assert cores() == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert cores() == 3
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cores() == 1


def test_what_is_not_set_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CXX", "")
    assert (visible_devices(), compiler()) == (None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CXX", "mycc")
    assert (visible_devices(), compiler()) == ("", "mycc")


def test_a_home_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="~nobody-of-this-name/x: there is no such home directory"):
        expanded("~nobody-of-this-name/x")
    assert expanded("~/x") == Path.home() / "x"


def test_few_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1")  # so that it is put back
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "300")
    env.few_kernels()
    assert 0 < int(os.environ["LRU_CACHE_CAPACITY"]) < 64
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "300"
