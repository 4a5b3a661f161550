"""Commands of glm-accelerate in processes that are copies of one which has imported torch: seconds faster.

Signals, environment, output and exit code are those of a fresh process. Not so its command line in /proc, and
what a library reads from the environment when it is loaded: tests about these start a fresh one.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from glm_accelerate.runtime.child import end_with_parent

# In the server from which processes are forked; kill_sweep's are among them.
LOADED = [
    "glm_accelerate.checkpoint.checkpointer",
    "glm_accelerate.cli.main",
    "glm_accelerate.cli.train",
    "glm_accelerate.parallel.launch",
    "glm_accelerate.training.run",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers",
]
# No run is long enough for the system to be measured before it begins: seconds in a process of its own.
UNMEASURED: dict[str, float] = {"glm_accelerate.plan.probe.WORTH": math.inf}
UNMEASURED_COMMAND = [  # ... nor of a fresh process
    sys.executable,
    "-c",
    "import math, sys; from glm_accelerate.plan import probe; probe.WORTH = math.inf; "
    "from glm_accelerate.cli.main import main; sys.exit(main())",
]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(LOADED)


@dataclass(frozen=True)
class Warm:
    """A command that runs, with as much of subprocess.Popen as tests need; its output goes to files."""

    args: tuple[str, ...]
    process: ForkServerProcess
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(
                self.args, timeout or 0.0, self.out.read_text(), self.err.read_text()
            )
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")

    def done(self, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """How it ended."""
        out, err = self.communicate(timeout)
        return subprocess.CompletedProcess(self.args, self.wait(), out, err)

    def read_until(self, text: str) -> str:
        """What it has written to stderr as soon as `text` is in it."""
        while text not in (written := self.err.read_text(encoding="utf-8") if self.err.exists() else ""):
            assert self.process.is_alive(), written
            time.sleep(0.01)
        return written

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Place:
    """Where a command runs; `group`: as the first process of a group of its own. `other`: what constants of
    modules are there. `code`: what is run in place of the command, with its words.
    """

    output: Path
    cwd: Path
    env: Mapping[str, str]
    group: bool
    other: Mapping[str, float]
    code: str = ""


def start(words: tuple[str, ...], place: Place) -> Warm:
    """`glm-accelerate words`."""
    process = SERVER.Process(target=_be_command, args=(words, place))
    process.start()
    return Warm(words, process, place.output / "out", place.output / "err")


def _be_command(words: tuple[str, ...], place: Place) -> None:
    end_with_parent()  # the server, which ends with the tests
    if place.group:
        os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place.output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(place.cwd)
    os.environ.clear()
    os.environ.update(place.env)
    tempfile.tempdir = None  # a module may have asked for it while it was loaded
    sys.argv = ["glm-accelerate", *words]
    for name, value in place.other.items():
        module, _, constant = name.rpartition(".")
        assert getattr(sys.modules[module], constant) is not None
        setattr(sys.modules[module], constant, value)
    exec(place.code or "import sys; from glm_accelerate.cli.main import main; sys.exit(main())", {})
