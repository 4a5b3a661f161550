"""One small trainer for all faults, in this process or in its own, and what has to hold after each."""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from glm_accelerate.checkpoint.audit import audit
from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.checkpoint.find import candidates, published
from glm_accelerate.cli.main import main
from glm_accelerate.config.load import load_config
from glm_accelerate.demo.tiny import Size, write_tiny
from glm_accelerate.observe.events import read_events
from glm_accelerate.training.build import Built
from glm_accelerate.training.run import Result, train
from tests.checkpoints import latest
from tests.processes import children_of
from tests.warm import Warm

CANARY = "hf_CANARY0123456789"  # a secret in the surroundings: no file of a run may hold it
WORDS = {"red": "rot", "green": "gruen", "blue": "blau"}
Event = Mapping[str, object]


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Trainer:
    """A config of fourteen steps, saved every three while training waits, and the ways to run it."""

    config: Path

    def train(self, run: Path, *words: str) -> Said:
        """The command, in this process."""
        return command(*self.words(run, *words))

    def words(self, run: Path, *more: str) -> list[str]:
        """Of the command."""
        return ["train", str(self.config), "--run", str(run), *more]

    def watched(
        self, run: Path, watch: "Callable[[Event], None]", patient: Collection[int] = (), *words: str
    ) -> Result:
        """Saved behind the training. Somebody hears of each event as it happens, of a step before its save;
        in `patient` steps not before the save under way has ended.
        """
        ready: list[Built] = []

        def heard(event: Event) -> None:
            while event["kind"] == "step" and event["step"] in patient and checkpointer_of(ready[0]).busy():
                time.sleep(0.005)
            watch(event)

        config = load_config(self.config, ["checkpoint.wait=false", *words])
        return train(config, run, observers=[Watcher(heard)], on_built=ready.append)


@dataclass(frozen=True)
class Watcher:
    watch: Callable[[Event], None]

    def observe(self, event: Event) -> None:
        self.watch(event)

    def close(self) -> None: ...


def checkpointer_of(built: Built) -> Checkpointer:
    return built.run.saver.checkpointer


def command(*words: str) -> Said:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Generator[Trainer]:
    root = tmp_path_factory.mktemp("trainer")
    size = Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    model = write_tiny(root / "model", [*WORDS, *WORDS.values(), "Say", "in", "German", "and"], size=size)
    with (root / "train.jsonl").open("w") as file:
        for number in range(22):
            asked = [list(WORDS)[(number * 5 + at * at) % 3] for at in range(1 + number % 7)]
            question, answer = f"Say in German {' and '.join(asked)}", " ".join(WORDS[word] for word in asked)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    said = {
        "model": {"path": str(model), "dtype": "float32"},
        "adapt": {"method": "lora", "rank": 4, "dropout": 0.1},
        "data": {
            "train": str(root / "train.jsonl"),
            "max_tokens": 128,
            "workers": 1,
            "cache": str(root / "cache"),
        },
        "train": {"steps": 14, "step_samples": 4},
        "optim": {"learning_rate": 1e-2},
        "checkpoint": {"every": 3, "wait": True},
    }
    (root / "tiny.yaml").write_text(yaml.safe_dump(said))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", CANARY)
        yield Trainer(root / "tiny.yaml")


@pytest.fixture(scope="session")
def trained(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended as it should: checkpoints 9, 12 and 14. To be copied, not touched."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert trainer.train(run).code == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def refused() -> Callable[..., None]:
    """refused(said, *words): it ended with 2 and one line that has all these words (I3)."""

    def check(said: Said, *words: str) -> None:
        assert said.code == 2, said
        assert said.err.startswith("error: "), said
        assert said.err.count("\n") == 1, said
        assert all(word in said.err for word in words), said

    return check


@pytest.fixture
def holds() -> Callable[..., Path]:
    """holds(run): a whole checkpoint is there and found (I1); nothing else under a checkpoint's name is taken
    for one (I2); no writer is left (I4); no secret is in any file (I5). Returns the checkpoint found.
    """

    def check(run: Path) -> Path:
        found, _ = latest(run)
        assert found is not None
        assert not audit(found).damaged
        assert set(candidates(run).paths) <= set(published(run))
        assert writers() == []
        for path in run.rglob("*"):
            assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
        return found

    return check


@pytest.fixture
def writer() -> Callable[[int], None]:
    """writer(signal): send it to the one writer process that belongs to this one."""

    def send(number: int) -> None:
        ends = time.monotonic() + 60
        while not (there := writers()):  # a process that was just made has no command line yet
            assert time.monotonic() < ends
            time.sleep(0.002)
        (process,) = there
        os.kill(process, number)
        while number == signal.SIGKILL and not ended(process):
            time.sleep(0.002)

    return send


def ended(process: int) -> bool:
    """Gone, or waiting only to be heard of: then its files are closed, if no other thread of it is left."""
    folder = Path(f"/proc/{process}")
    try:
        waits = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return waits and len(os.listdir(folder / "task")) == 1
    except OSError:
        return True


def writers(trainer: int | None = None) -> list[int]:
    """The processes among a trainer's children that write checkpoints."""
    found: list[int] = []
    for child in children_of(trainer or os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@pytest.fixture
def stopped_writer() -> Callable[[Warm, Path], int]:
    """stopped_writer(process, run): wait for the first step of a trainer and stop its writer."""

    def stop(process: Warm, run: Path) -> int:
        log = run / "events.jsonl"
        while not (log.exists() and len(re.findall(rb'"kind": "step"', log.read_bytes())) >= 2):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        while not (there := writers(process.pid)):
            time.sleep(0.01)
        os.kill(there[0], signal.SIGSTOP)
        return there[0]

    return stop


@pytest.fixture
def shell() -> Callable[..., Said]:
    """shell(*words): any verb, in this process."""
    return command


@pytest.fixture
def writer_limit() -> Callable[[int], None]:
    """writer_limit(bytes): no file of the writer process may become larger."""

    def limit(most: int) -> None:
        while not (there := writers()):
            time.sleep(0.002)
        _, hard = resource.prlimit(there[0], resource.RLIMIT_FSIZE)
        resource.prlimit(there[0], resource.RLIMIT_FSIZE, (most, hard))

    return limit


@pytest.fixture
def frozen() -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """with frozen(path): nobody, root included, may change it; skips where that cannot be said."""

    @contextlib.contextmanager
    def hold(path: Path) -> Generator[None]:
        if shutil.which("chattr") is None:
            pytest.skip("chattr is not installed")
        said = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
        if said.returncode:
            pytest.skip(f"chattr +i does not work here: {said.stderr.strip()}")
        try:
            yield
        finally:
            subprocess.run(["chattr", "-i", str(path)], check=True)

    return hold


def warnings(run: Path) -> list[str]:
    """What the run's log warned of."""
    return [str(event["said"]) for event in read_events(run / "events.jsonl") if event["kind"] == "warning"]


@pytest.fixture
def warned() -> Callable[[Path], str]:
    """warned(run): all warnings in one text."""
    return lambda run: "\n".join(warnings(run))
