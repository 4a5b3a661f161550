"""What the page shows of a run, read from its directory: nothing is locked, nothing written.

events.jsonl -> whole lines from a byte on, steps thinned -> the page, which asks again from where it was
"""

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from glm_accelerate.parallel.heartbeat import QUIET
from glm_accelerate.plan.run_plan import Memory
from glm_accelerate.runtime.words import duration
from glm_accelerate.training import signs
from glm_accelerate.training.lock import LOCK

MOST_STEPS = 4000  # of one answer: as many as a screen has columns
STEP = b'"kind": "step"'
USUAL = 320  # bytes of a step's line
BLOCK = 1 << 24
MOST_ANSWERS = 20
LATE = 30.0  # seconds after which a node's file is missed: a shared disk shows it late
MISSED = {"silent": "is silent", "stopped": "is stopped by a signal", "gone": "is gone"}
MOST_OF_A_NODE = 1 << 20  # bytes of its file


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """A run directory, under the name that the page shows."""

    directory: Path
    name: str

    def about(self) -> dict[str, Any]:
        """Of its plan: what was foretold. A run that has not begun has none yet."""
        known: dict[str, Any] = {"name": self.name, "memory": None, "reasons": []}
        with suppress(OSError, ValueError, KeyError):
            plan = json.loads((self.directory / "plan.json").read_bytes())
            known["reasons"] = [[each["name"], each["value"], each["why"]] for each in plan["reasons"]]
            known["memory"] = Memory.from_json(plan["memory"]).watched(plan["device"])
        return known

    def gone(self) -> str:
        """The process that trained here, if it was on this machine and is no more."""
        with suppress(OSError):
            holder = re.match(r"process (\d+) on (\S+),", (self.directory / LOCK).read_text(encoding="utf-8"))
            if holder and holder[2] == socket.gethostname() and not Path("/proc", holder[1]).exists():
                return f"process {holder[1]}" if Path("/proc/self").exists() else ""
        return ""

    def nodes(self) -> list[dict[str, Any]]:
        """Each node with its ranks, and how they are now, by what it wrote last."""
        found: list[dict[str, Any]] = []
        for path in sorted((self.directory / signs.FOLDER).glob("*.json")):
            with (
                suppress(OSError, ValueError, LookupError, TypeError, RecursionError),
                path.open("rb") as file,
            ):
                found.append(_node(json.loads(file.read(MOST_OF_A_NODE)), time.time()))
        newest = max((node["attempt"] for node in found), default=0)
        for node in found:
            if node["attempt"] < newest:
                for rank in node["ranks"]:
                    rank["state"] = "left"
        return sorted(found, key=lambda node: (-node["attempt"], node["first"]))

    def missed(self) -> list[str]:
        """Each rank of the newest start that should give signs of life and does not, in words."""
        return [
            f"rank {rank['rank']} on {node['node']} {MISSED[rank['state']]}{_since(rank)}"
            for node in self.nodes()
            for rank in node["ranks"]
            if rank["state"] in MISSED
        ]

    def events(self, start: int) -> dict[str, Any]:
        """Events from a byte on, `next` to ask from, and `every`: one of so many steps is among them."""
        path = self.directory / "events.jsonl"
        try:
            file = path.open("rb")
        except OSError:
            return {"events": [], "next": 0, "every": 1}
        with file:
            size = file.seek(0, 2)
            start = start if start <= size else 0  # another run began here
            every = max(1, (size - start) // USUAL // MOST_STEPS)
            file.seek(start)
            lines, end = _whole_lines(file, start, every)
        return {"events": [each for each in _parsed(lines) if "kind" in each], "next": end, "every": every}

    def answers(self, step: int) -> list[dict[str, Any]]:
        """The first answers that the evaluation of a step generated."""
        found: list[dict[str, Any]] = []
        for path in sorted((self.directory / "evals").glob(f"{step}-*.predictions.jsonl"))[-1:]:
            with path.open("rb") as file:
                lines = [file.readline(BLOCK) for _ in range(MOST_ANSWERS)]
            found += _parsed([line for line in lines if line])
        return found


def _node(said: dict[str, Any], now: float) -> dict[str, Any]:
    """A node's file as the page takes it; an error where it is torn, or none of ours."""
    age = max(0.0, now - _number(said["time"]))
    ranks = [_rank(each, age, bool(said["ended"])) for each in said["ranks"]]
    return {
        "node": _text(said["node"]),
        "attempt": _number(said["attempt"]),
        "first": min(each["rank"] for each in ranks),
        "age": age,
        "load": _number(said["load"]),
        "cores": _number(said["cores"]),
        "free": _number(said["memory"]["free"]),
        "whole": _number(said["memory"]["whole"]),
        "ranks": sorted(ranks, key=lambda each: each["rank"]),
        "others": [
            {
                "device": _text(each["device"]),
                "bytes": _number(each["bytes"]),
                "count": _number(each["count"]),
                "named": list(map(_text, each["named"])),
            }
            for each in said["others"]
        ],
    }


def _rank(said: dict[str, Any], age: float, ended: bool) -> dict[str, Any]:
    """A rank, and in one word how it is. Its silence counts from its own last sign."""
    if said["process"] is None:
        return {"rank": _number(said["rank"]), "state": "ended" if ended else "gone"}
    silent = _number(said["silent"])
    state = "ended" if ended else "stopped" if said["stopped"] else "alive"
    if state == "alive" and (silent >= QUIET or age > LATE):
        state = "silent"
    return {
        "rank": _number(said["rank"]),
        "state": state,
        "process": _number(said["process"]),
        "step": _number(said["step"]),
        "phase": _text(said["phase"]),
        "seconds": silent + age,
    }


def _text(value: object) -> str:
    """As text that can be sent: half a character cannot."""
    return str(value).encode("utf-8", "replace").decode()


def _since(rank: dict[str, Any]) -> str:
    return f": no sign for {duration(rank['seconds'])}" if "seconds" in rank else ""


def _number(value: object) -> float:
    """A number that JSON has: not NaN, with which a browser would not read the answer."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return value


def _whole_lines(file: BinaryIO, start: int, every: int) -> tuple[list[bytes], int]:
    """Lines up to the last whole one: all that are no steps, and of steps the last and one of so many."""
    lines: list[bytes] = []
    rest, end, count, last = b"", start, 0, b""
    while block := file.read(BLOCK):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            end += len(line) + 1
            if STEP in line[:100]:
                count, last = count + 1, line
                if count % every:
                    continue
            lines.append(line)
    if count % every:
        lines.append(last)
    return lines, end


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """What is JSON; a line that a killed process tore is passed over."""
    for line in lines:
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value
