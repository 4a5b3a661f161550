"""Who can reach the processes of a run: no other machine, and nothing that they hear is unpickled."""

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from torch.distributed import DistError, TCPStore

from tests.processes import children_of

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as the kernel writes them
# A launcher which, as its ranks, leaves word of what it imported that unpickles what a socket brings.
WATCHED = """
import math
import os
import sys
from pathlib import Path
from glm_accelerate.cli import main, train
from glm_accelerate.plan import probe

probe.WORTH = math.inf
one_rank = train.one_rank
UNPICKLERS = ("torch.distributed.elastic.rendezvous", "multiprocessing.managers")


def watched(args):
    code = one_rank(args)
    leave_word()
    return code


def leave_word():
    found = [name for name in sys.modules if name.startswith(UNPICKLERS)]
    Path(os.environ["WORD"], f"{os.getpid()}").write_text(" ".join(found))


def go():
    train.one_rank = watched
    code = main.main()
    leave_word()
    sys.exit(code)
"""


class Exploit:
    """What torch's elastic agent ran when it found it in its store, where a client left it that knows no
    secret.
    """

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.owned}",)


def descendants(process: int) -> set[int]:
    return {process}.union(*map(descendants, children_of(process)))


def listening(processes: set[int]) -> set[tuple[str, int]]:
    """(address, port) of each socket on which one of them listens."""
    held: set[str] = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                held.add(os.readlink(entry))
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, port = words[1].split(":")
            if words[3] == LISTENING and f"socket:[{words[9]}]" in held:
                found.add((address, int(port, 16)))
    return found


def attack(port: int, owned: Path) -> None:
    with suppress(DistError):  # where gloo listens nobody answers, until it ends
        store = TCPStore("127.0.0.1", port, is_master=False)
        for key in store.list_keys():
            store.set(key, base64.b64encode(pickle.dumps(Exploit(owned))))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("evaluated", [pytest.param("inline", marks=pytest.mark.prove), "beside", "external"])
def test_nothing_listens_beyond_loopback_and_nothing_heard_is_run(
    evaluated: str, tiny_run: dict[str, Any], tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    run, word, owned = tmp_path / "run", tmp_path / "word", tmp_path / "owned"
    word.mkdir()
    said = {**tiny_run, "train": {"steps": 100_000, "step_samples": 4}}
    said["precision"] = {"compile": "off"}
    said["evaluate"] = {"every": 3, "where": evaluated}
    (tmp_path / "ranks.yaml").write_text(yaml.safe_dump(said))
    (tmp_path / "watched.py").write_text(WATCHED)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import watched; watched.go()"
    words = ["train", str(tmp_path / "ranks.yaml"), "--run", str(run), "--nproc", "2"]
    there = os.environ | {"WORD": str(word), "TMPDIR": str(tmp_path)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        there.pop(name, None)
    job = spawn([sys.executable, "-c", start, *words], env=there, stderr=subprocess.PIPE, text=True)
    jobs = [job]
    if evaluated == "external":
        while not (run / "config.yaml").exists():
            time.sleep(0.05)
        follow = [sys.executable, "-m", "glm_accelerate.cli.main", "evaluate", str(run), "--follow"]
        jobs.append(spawn(follow, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    log = run / "evals.jsonl"
    seen: set[tuple[str, int]] = set()
    while not log.exists() or log.read_text().count('"done"') < 2:
        assert job.poll() is None, job.communicate()
        seen |= listening(set().union(*(descendants(each.pid) for each in jobs)))
        time.sleep(0.05)
    assert seen  # gloo's own
    assert {address for address, _ in seen} <= LOOPBACK
    attacks = [Thread(target=attack, args=(port, owned), daemon=True) for _, port in seen]
    for one in attacks:
        one.start()
    ends = time.monotonic() + 3
    for one in attacks:
        one.join(max(0.0, ends - time.monotonic()))
    reached = log.read_text().count('"done"')
    while log.read_text().count('"done"') < reached + 2:  # nor is the run disturbed
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert (job.communicate(timeout=120), job.returncode)[1] == 75
    assert not owned.exists()
    assert [file.read_text() for file in word.iterdir()] == ["", "", ""]
    assert not list(tmp_path.glob("glm-accelerate-*"))
    assert not list(tmp_path.glob("torchelastic_*"))
