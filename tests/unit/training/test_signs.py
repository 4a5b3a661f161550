"""What a run tells of its ranks: whole files, as long as they live, and nothing that only looks alive."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.heartbeat import Doing
from glm_accelerate.parallel.place import Place
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.host import Holder
from glm_accelerate.training import signs
from glm_accelerate.training.life import Life
from glm_accelerate.training.signs import FOLDER, NodeSigns, shown_signs
from glm_accelerate.watch.run import LATE, WatchedRun

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_NODE", "here")
    monkeypatch.setattr(signs, "INTERVAL", 0.02)


def life(run: Path, attempt: int = 1, doing: Doing | None = None) -> Life:
    """Of a rank alone."""
    ranks = Ranks(doing=doing or Doing())
    return Life(run, "", attempt, Place(ranks), Events([], attempt))


def written(run: Path, enough: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """The node's file, as soon as it says enough. Each time that it is read it is whole."""
    path, ends = run / FOLDER / "here.json", time.monotonic() + 30
    while time.monotonic() < ends:
        if path.exists() and enough(said := json.loads(path.read_text())):
            return said
        time.sleep(0.005)
    raise AssertionError(path.read_text() if path.exists() else "nothing was written")


def test_a_rank_alone_tells_what_it_does_and_that_it_ended(tmp_path: Path) -> None:
    doing = Doing()
    with shown_signs(life(tmp_path, 3, doing), CPU):
        first = written(tmp_path)
        doing.step, doing.phase = 7, "training"
        said = written(tmp_path, lambda said: said["ranks"][0]["step"] == 7)
        assert said["time"] > first["time"]
        assert said["ranks"] == [
            {
                "rank": 0,
                "process": os.getpid(),
                "step": 7,
                "phase": "training",
                "silent": 0.0,
                "stopped": False,
            }
        ]
        assert (said["node"], said["attempt"], said["ended"]) == ("here", 3, False)
        assert said["cores"] == os.cpu_count()
        assert 0 < said["memory"]["free"] <= said["memory"]["whole"]
        (node,) = WatchedRun(tmp_path, "run").nodes()
        assert node["ranks"][0]["state"] == "alive"
    assert written(tmp_path)["ended"]
    (node,) = WatchedRun(tmp_path, "run").nodes()
    assert node["ranks"][0]["state"] == "ended"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["here.json"]
    time.sleep(0.1)
    assert written(tmp_path)["ended"]  # nothing came later


def test_who_else_holds_memory_is_told_and_what_we_started_is_not(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as ours,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as evaluator,
    ):
        try:
            with shown_signs(life(tmp_path), CPU):
                (others,) = written(tmp_path, lambda said: bool(said["others"]))["others"]
        finally:
            ours.kill()
            evaluator.kill()
    assert others["device"] == "cpu"
    assert len(others["named"]) == min(others["count"], signs.NAMED)
    told = " ".join(others["named"])
    assert not any(f"(process {pid})" in told for pid in (os.getpid(), ours.pid, evaluator.pid))


def test_a_driver_that_hangs_silences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def hang(device: torch.device) -> list[Holder]:
        asked.wait()
        return [Holder(1, "init", 1 << 20)]

    monkeypatch.setattr(signs, "others_on", hang)
    with shown_signs(life(tmp_path), CPU):
        first = written(tmp_path)["time"]
        assert written(tmp_path, lambda said: said["time"] > first)["others"] == []
        asked.set()
        (others,) = written(tmp_path, lambda said: bool(said["others"]))["others"]
        assert others == {"device": "cpu", "bytes": 1 << 20, "count": 1, "named": ["init (process 1) 1 MiB"]}


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with shown_signs(life(tmp_path), CPU):
        time.sleep(0.1)
    assert WatchedRun(tmp_path, "run").nodes() == []


def test_a_killed_run_and_nodes_that_were_left_do_not_look_alive(tmp_path: Path) -> None:
    with shown_signs(life(tmp_path, 4, Doing(5, "saving")), CPU):
        said = written(tmp_path)
    said |= {"time": time.time() - 2 * LATE}  # killed: no last file
    for name, attempt in (("here", 4), ("left", 3), ("long ago", 2)):
        text = json.dumps(said | {"node": name, "attempt": attempt})
        (tmp_path / FOLDER / f"{name}.json").write_text(text)
    (tmp_path / FOLDER / ".here.json.torn").write_text("{")
    states = [(node["node"], node["ranks"][0]["state"]) for node in WatchedRun(tmp_path, "run").nodes()]
    assert states == [("here", "silent"), ("left", "left"), ("long ago", "left")]
    NodeSigns(tmp_path / FOLDER, 4, Ranks(doing=Doing()), CPU, None).forget_earlier()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["here.json", "left.json"]


def test_a_run_that_is_moved_leaves_nothing_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with shown_signs(life(tmp_path / "run"), CPU):
        written(tmp_path / "run")
        (tmp_path / "run").rename(tmp_path / "moved")
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


@pytest.mark.parametrize("name", ["<script>", "../../up", "..", "n" * 300, "节点/1", "half \udcff"])
def test_any_name_of_a_node_is_a_file_in_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_NODE", name)
    (tmp_path / "run").mkdir()
    with shown_signs(life(tmp_path / "run"), CPU):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (node,) = WatchedRun(tmp_path / "run", "run").nodes()
    assert node["node"] == name.encode("utf-8", "replace").decode()
