"""The system calls of a process that change files, seen and struck by strace."""

import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    *("open", "openat", "creat", "mkdir", "mkdirat", "write", "pwrite64", "writev", "pwritev", "pwritev2"),
    *("ftruncate", "truncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "syncfs", "sendfile"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "copy_file_range"),
    *("unlink", "unlinkat", "rmdir", "chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat"),
)
LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)")
OPENS = ("open", "openat", "creat")
PATIENCE = 30.0  # seconds for anything that takes milliseconds


@dataclass(frozen=True)
class Call:
    """One call, as strace writes it; `number` counts calls of its name in its thread, as strace does."""

    thread: int
    name: str
    number: int
    text: str

    def changes(self, directory: Path) -> bool:
        """Whether it can change what lies there, or tell somebody that it did."""
        if self.name in OPENS and not re.search(r"O_CREAT|O_TRUNC", self.text):
            return False
        return str(directory) in self.text or "<pipe:" in self.text


def why_not() -> str:
    """Why no process can be traced here; empty if one can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        tracer = subprocess.Popen(["strace", "-p", str(sleeper.pid)], stderr=subprocess.PIPE, text=True)
        with tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            tracer.terminate()
        sleeper.kill()
    return "" if "attached" in said else f"a process may not be traced here ({said.strip()})"


def attach(process: int, log: Path, inject: str = "") -> "subprocess.Popen[bytes]":
    """Trace a running process and all its threads from here on."""
    words = [
        "strace",
        "-f",
        "-y",
        "-s",
        "0",
        "-o",
        str(log),
        "-e",
        f"trace={','.join('?' + c for c in CALLS)}",
    ]
    words += [*(("-e", f"inject={inject}") if inject else ()), "-p", str(process)]
    tracer = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + PATIENCE
    while not all(_traced(task) for task in Path(f"/proc/{process}/task").iterdir()):
        assert time.monotonic() < ends, "strace does not attach"
        time.sleep(0.002)
    return tracer


def read(log: Path, only: int | None = None) -> list[Call]:
    """The calls of a log in the order in which they began, each as one text; of one thread, if asked."""
    calls: list[Call] = []
    counts: Counter[tuple[int, str]] = Counter()
    open_calls: dict[int, int] = {}
    for line in log.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        thread, resumed, text = int(match[1]), match[2], match[3]
        if text.startswith(("+++", "---")):
            continue
        if resumed:
            place = open_calls.pop(thread)
            before = calls[place]
            calls[place] = Call(thread, before.name, before.number, before.text + text)
            continue
        name = text.partition("(")[0]
        counts[thread, name] += 1
        if text.endswith("<unfinished ...>"):
            text = text.removesuffix("<unfinished ...>").rstrip()
            open_calls[thread] = len(calls)
        calls.append(Call(thread, name, counts[thread, name], text))
    return [call for call in calls if only in (None, call.thread)]


def _traced(task: Path) -> bool:
    return re.search(r"TracerPid:\t[1-9]", (task / "status").read_text()) is not None
