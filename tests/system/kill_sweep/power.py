"""A power loss after each call of a save, built from its log.

Sure to survive: the bytes that a file had when it was last synced, and the names that a directory had when it
was. A kernel may have written more by itself, so each moment has several outcomes.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kill_sweep.trace import OPENS, Call

# What becomes of names and of bytes that were not synced.
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "all is gone": ("gone", "gone"),
    "names stay, bytes are gone": ("stay", "gone"),
    "names stay, bytes are zero": ("stay", "zero"),
    "names are gone, bytes stay": ("gone", "stay"),
}


@dataclass(eq=False)
class Node:
    """A file or a directory: as programs see it, and as it is on disk for sure."""

    is_file: bool
    names: "dict[str, Node]" = field(default_factory=dict)
    synced_names: "dict[str, Node]" = field(default_factory=dict)
    content: bytes = b""  # of a new file: known at the end
    length: int = 0
    synced: int = 0


@dataclass(frozen=True)
class Remains:
    """One file or directory after a power loss."""

    path: Path
    node: Node
    kept: int  # bytes
    length: int


class Disk:
    """What lies in a run directory while a save goes on. Whatever was there before is on disk."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._root = _load(run)

    def apply(self, call: Call) -> None:
        """Do what a call did that did not fail."""
        match = re.fullmatch(r"(.*) = (\d+)(<.*>)?", call.text)
        if match is None or "<pipe:" in call.text:
            return
        paths = [Path(folder, path) for folder, path in re.findall(r'(?:<(/[^>]*)>, )?"(.*?)"', match[1])]
        if call.name in OPENS:
            folder, name = self._place(paths[0])
            assert name not in folder.names or "O_TRUNC" in call.text, f"no model of {call.text}"
            if name in folder.names:  # overwritten: the old bytes may be gone at once, even on disk
                folder.synced_names[name] = folder.names[name] = Node(is_file=True)
            else:
                folder.names[name] = Node(is_file=True)
        elif call.name in ("mkdir", "mkdirat"):
            folder, name = self._place(paths[0])
            folder.names[name] = Node(is_file=False)
        elif call.name in ("rename", "renameat", "renameat2"):
            folder, name = self._place(paths[0])
            other, new = self._place(paths[1])
            other.names[new] = folder.names.pop(name)
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            folder, name = self._place(paths[0])
            del folder.names[name]
        elif call.name == "write":
            self._node(_descriptor(call)).length += int(match[2])
        elif call.name in ("fsync", "fdatasync"):
            node = self._node(_descriptor(call))
            node.synced, node.synced_names = node.length, dict(node.names)
        else:
            raise AssertionError(f"no model of {call.text}")

    def learn(self) -> None:
        """What the new files hold, from the run as the save left it."""
        _learn(self._root, self._run)

    def crash(self, outcome: str) -> list[Remains]:
        """What a power loss leaves now, each directory before what is in it."""
        return list(_remains(self._root, Path(), *OUTCOMES[outcome]))

    def _place(self, path: Path) -> tuple[Node, str]:
        return self._node(path.parent), path.name

    def _node(self, path: Path) -> Node:
        node = self._root
        for name in path.relative_to(self._run).parts:
            node = node.names[name]
        return node


def rebuild(remains: Sequence[Remains], target: Path) -> None:
    """Make it real. The contents have to be learned by then."""
    for one in remains:
        path = target / one.path
        if not one.node.is_file:
            path.mkdir()
            continue
        path.write_bytes(one.node.content[: one.kept])
        os.truncate(path, one.length)


def _descriptor(call: Call) -> Path:
    """The path that strace shows for the first argument."""
    match = re.match(r"\w+\(\d+<(.*?)>", call.text)
    assert match, call.text
    return Path(match[1])


def _load(path: Path) -> Node:
    if path.is_file():
        content = path.read_bytes()
        return Node(is_file=True, content=content, length=len(content), synced=len(content))
    names = {entry.name: _load(entry) for entry in path.iterdir()}
    return Node(is_file=False, names=names, synced_names=dict(names))


def _learn(node: Node, path: Path) -> None:
    if node.is_file:
        node.content = path.read_bytes()
        assert len(node.content) == node.length, f"the log misses writes to {path}"
    for name, below in node.names.items():
        _learn(below, path / name)


def _remains(node: Node, path: Path, names: str, content: str) -> list[Remains]:
    kept = node.length if content == "stay" else node.synced
    found = [Remains(path, node, kept, node.length if content == "zero" else kept)]
    for name, below in (node.names if names == "stay" else node.synced_names).items():
        found += _remains(below, path / name, names, content)
    return found
