"""Which ranks are alive, for whoever watches the run from outside: RUN/ranks/NODE.json, one file a node.

signs of life of the node's ranks, its load and memory, who else holds memory of its devices -> every 5 s,
whole, by the first of its ranks that is alive. A run whose files cannot be written goes on without them.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from glm_accelerate.memory.monitor import others_on
from glm_accelerate.parallel.heartbeat import QUIET, Sign, beating, signs
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.env import node_name, signs_folder
from glm_accelerate.runtime.files import make_folder, write_text
from glm_accelerate.runtime.host import Holder, host_memory
from glm_accelerate.training.life import Life

FOLDER = "ranks"
INTERVAL = 5.0  # seconds between two files
ASKED = 30.0  # seconds between two questions who holds memory: a driver may take one to answer
NAMED = 3  # of those who do, at most
LONGEST = 200  # characters of a file's name


@contextmanager
def shown_signs(life: Life, device: torch.device) -> Generator[None, None, None]:
    """While entered, the run's directory says how the ranks of this node are. All ranks enter it together."""
    with _heard(life.ranks) as folder:
        node = NodeSigns(life.run / FOLDER, life.attempt, life.ranks, device, folder)
        if life.ranks.first:
            node.forget_earlier()
        threads = [threading.Thread(target=each, daemon=True) for each in (node.keep, node.ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            node.end()


@dataclass(slots=True)
class NodeSigns:
    """What a rank knows of its node. `folder`: of signs of life; None: it is the only rank."""

    files: Path
    attempt: int
    ranks: Ranks
    device: torch.device
    folder: Path | None
    name: str = field(default_factory=node_name)
    others: dict[str, list[Holder]] = field(default_factory=dict[str, list[Holder]])  # by device
    over: threading.Event = field(default_factory=threading.Event)
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def local(self) -> list[int]:
        """The ranks of this node."""
        nodes = self.ranks.nodes or (self.name,) * self.ranks.count
        return [rank for rank, name in enumerate(nodes) if name == self.name]

    def signs(self) -> dict[int, Sign]:
        """By rank: the last sign of each whose process is there."""
        rank, doing = self.ranks.rank, self.ranks.doing
        known = {} if self.folder is None else {sign.rank: sign for sign in signs(self.folder)}
        return known | {rank: Sign(rank, os.getpid(), 0.0, doing.step, doing.phase)}

    def writes(self, known: dict[int, Sign]) -> bool:
        """Whether it is this rank that writes: the first one, or another if all before it are silent."""
        before = (known[rank] for rank in self.local if rank < self.ranks.rank and rank in known)
        return all(sign.seconds >= QUIET for sign in before)

    def keep(self) -> None:
        """Write until it is over. Of its own thread."""
        while True:
            with self.writing:
                if self.over.is_set():
                    return
                self._write()
            self.over.wait(INTERVAL)

    def ask(self) -> None:
        """Ask who holds memory, until it is over. Of its own thread: a driver may hang."""
        while not self.over.is_set():
            known = self.signs()
            if self.writes(known):
                ours = {os.getpid(), *(sign.process for sign in known.values())}
                for device in self._devices():
                    self.others[str(device)] = [one for one in others_on(device) if not _of(one.pid, ours)]
            self.over.wait(ASKED)

    def end(self) -> None:
        """The last file says that the ranks ended, and were not lost."""
        self.over.set()
        with self.writing:
            self._write(ended=True)

    def forget_earlier(self) -> None:
        """Nodes that the last attempt had not either, and what killed writers left."""
        with suppress(OSError):
            for path in self.files.glob(".*.json.*"):
                path.unlink(missing_ok=True)
            for path in self.files.glob("*.json"):
                with suppress(ValueError, TypeError, AttributeError):
                    if json.loads(path.read_bytes()).get("attempt", 0) < self.attempt - 1:
                        path.unlink(missing_ok=True)

    def _devices(self) -> Sequence[torch.device]:
        """Of all ranks here: each accelerator by its number on the node; the one CPU for all."""
        if self.device.type == "cpu":
            return [self.device]
        return [torch.device(self.device.type, number) for number in range(len(self.local))]

    def _write(self, ended: bool = False) -> None:
        known = self.signs()
        if self.writes(known):
            with suppress(OSError):  # a full disk, or a directory that is gone: training goes on
                if self.files.parent.is_dir():  # a run that was moved is not begun anew
                    make_folder(self.files)
                path = self.files / f"{quote(self.name, safe='', errors='replace')[:LONGEST]}.json"
                write_text(path, json.dumps(self._state(known, ended)), synced=False)

    def _state(self, known: dict[int, Sign], ended: bool) -> dict[str, Any]:
        whole, free = host_memory()
        return {
            "node": self.name,
            "time": time.time(),
            "attempt": self.attempt,
            "ended": ended,
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "memory": {"free": free, "whole": whole},
            "ranks": [_rank(rank, known.get(rank)) for rank in self.local],
            "others": [
                {
                    "device": device,
                    "bytes": sum(one.bytes for one in holders),
                    "count": len(holders),
                    "named": [str(one) for one in holders[:NAMED]],
                }
                for device, holders in sorted(self.others.items())
            ],
        }


def _rank(rank: int, sign: Sign | None) -> dict[str, Any]:
    """Of a rank; of one whose process is gone, only that."""
    if sign is None:
        return {"rank": rank, "process": None}
    return {
        "rank": rank,
        "process": sign.process,
        "step": sign.step,
        "phase": sign.phase,
        "silent": sign.seconds,
        "stopped": sign.stopped,
    }


@contextmanager
def _heard(ranks: Ranks) -> Generator[Path | None, None, None]:
    """Where the ranks of this node leave their signs of life: under a launcher that does not watch (torchrun)
    in a folder of their own.
    """
    watched = None if ranks.count == 1 else signs_folder()
    if ranks.count == 1 or watched is not None:
        yield watched
        return
    name = node_name()
    first = (ranks.nodes or (name,) * ranks.count).index(name)
    own = tempfile.mkdtemp(prefix="glm-accelerate-") if ranks.rank == first else ""
    folder = Path(ranks.gather(own)[first])
    try:
        with beating(folder, ranks.rank, ranks.doing):
            yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()  # the last one can


def _of(process: int, ours: set[int]) -> bool:
    """Whether a process is one of ours, or was started by one, as evaluators and writers are."""
    while process > 1:
        if process in ours:
            return True
        try:
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        process = int(status.rpartition(")")[2].split()[1])
    return False
