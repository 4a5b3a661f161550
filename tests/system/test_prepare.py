"""Preparing data on bad days, with real processes: kills, Ctrl-C, two builders at once, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from glm_accelerate.config.sources import Source
from glm_accelerate.data.prepare import prepare
from glm_accelerate.data.store import Store
from glm_accelerate.data.workers import EncodeSettings
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.runtime.errors import UserError

SETTINGS = EncodeSettings(template="glm4-0414", max_tokens=64)
RANGE_BYTES = 2000
PATIENCE = 20.0

# Builds as told on its command line. `hold`: in the middle of encoding, say so and wait for a file to appear.
BUILDER = """
import resource, sys, time
from pathlib import Path
from glm_accelerate.config.sources import Source
from glm_accelerate.data.prepare import prepare
from glm_accelerate.data.workers import EncodeSettings
from glm_accelerate.runtime.errors import UserError

data, model, cache, hold, limit = sys.argv[1:6]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
steps = []

def progress(done, total):
    steps.append(done)
    if done == total // 2:
        print("scanned", flush=True)
    if hold and done > total * 0.6 and not Path(hold).exists():
        print("encoding", flush=True)
        while not Path(hold).exists():
            time.sleep(0.01)

try:
    store = prepare(
        [Source(path=data, weight=1.0)],
        EncodeSettings(template="glm4-0414", max_tokens=64),
        Path(model),
        cache=Path(cache),
        workers=2,
        progress=progress,
        range_bytes=2000,
    )
except UserError as error:
    print("error", error, flush=True)
    sys.exit(2)
print("done", len(store), store.fingerprint, sum(done * 2 > steps[-1] for done in steps), flush=True)
"""


Builder = subprocess.Popen[str]


@dataclass
class Bench:
    """A data file, a model and a cache."""

    data: Path
    model: Path
    cache: Path

    @contextmanager
    def builder(self, hold: Path | None = None, limit: int = 0) -> Generator[Builder, None, None]:
        words = [self.data, self.model, self.cache, hold or "", limit]
        process = subprocess.Popen(
            [sys.executable, "-c", BUILDER, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> Store:
        sources = [Source(path=str(self.data), weight=1.0)]
        return prepare(
            sources,
            SETTINGS,
            self.model,
            cache=self.cache,
            workers=2,
            progress=progress,
            range_bytes=RANGE_BYTES,
        )

    def stores(self) -> list[Path]:
        return [path for path in self.cache.iterdir() if (path / "report.json").exists()]

    def leftovers(self) -> list[Path]:
        return list(self.cache.glob(".building-*"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    model = tmp_path / "model"
    model.mkdir()
    build_tokenizer(["hello"]).save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"model_type": "glm4"}')
    turns = [
        [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i} " * (i % 9)}]
        for i in range(1, 501)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return Bench(data, model, tmp_path / "cache")


def wait_for(line: str, stream: IO[str] | None) -> str:
    assert stream is not None
    for said in stream:
        if said.startswith(line):
            return said
    raise AssertionError(f"ended without saying {line!r}")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int]) -> bool:
    """Ended, if perhaps not yet buried."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_builder_leaves_nothing_behind_for_long(bench: Bench, tmp_path: Path) -> None:
    with bench.builder(hold=tmp_path / "never") as process:
        wait_for("encoding", process.stdout)
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert gone(workers), "workers end with their parent, however it ended"
    assert not bench.stores()
    assert len(bench.leftovers()) == 1

    store = bench.prepare()
    assert len(store) == 500
    assert len(bench.stores()) == 1
    assert not bench.leftovers()


def test_ctrl_c_leaves_nothing_behind(bench: Bench, tmp_path: Path) -> None:
    with bench.builder(hold=tmp_path / "never") as process:
        wait_for("encoding", process.stdout)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=PATIENCE)
        assert "KeyboardInterrupt" in said
        assert said.count("Traceback") == 1, "no worker complains"
    assert gone(workers)
    assert not bench.stores()
    assert not bench.leftovers()
    assert len(bench.prepare()) == 500


def test_two_builders_at_once_build_once(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with bench.builder(hold=go) as first, bench.builder(hold=go) as second:
        # One of them is in the middle; the other has scanned, wants the same directory and waits.
        wait_for("scanned", first.stdout)
        wait_for("scanned", second.stdout)
        until = time.monotonic() + PATIENCE
        while not bench.leftovers() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(bench.leftovers()) == 1
        assert first.poll() is None
        assert second.poll() is None
        go.touch()
        ends = [wait_for("done", process.stdout).split()[1:] for process in (first, second)]
        assert [process.wait(PATIENCE) for process in (first, second)] == [0, 0]

    (samples, fingerprint, steps), (other_samples, other_fingerprint, other_steps) = ends
    assert samples == other_samples == "500"
    assert fingerprint == other_fingerprint
    assert sorted(int(count) > 1 for count in (steps, other_steps)) == [False, True], "only one encoded"
    assert len(bench.stores()) == 1
    assert not bench.leftovers()


def test_a_full_disk_is_named_with_what_is_needed(bench: Bench) -> None:
    # A limit on the size of files fails a write just as a full disk does, and needs no rights.
    with bench.builder(limit=20_000) as process:
        said = wait_for("error", process.stdout)
        assert process.wait(PATIENCE) == 2
    assert f"error {bench.cache}: no room to keep the prepared data, about" in said
    needed = int(said.partition("about ")[2].partition(" bytes")[0].replace(",", ""))
    assert not bench.stores()
    assert not bench.leftovers()

    bench.prepare()
    (directory,) = bench.stores()
    really = sum(path.stat().st_size for path in directory.iterdir())
    assert 0.5 * really < needed < 2 * really


def test_a_killed_worker_is_named(bench: Bench) -> None:
    others = children(os.getpid())
    workers: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done > total // 2 and not workers:
            workers.extend(pid for pid in children(os.getpid()) if pid not in others)
            os.kill(workers[0], signal.SIGKILL)

    began = time.monotonic()
    with pytest.raises(UserError, match="SIGKILL") as caught:
        bench.prepare(kill_one)
    assert f"process {workers[0]} was killed" in str(caught.value)
    assert str(caught.value.where).startswith(f"{bench.data}:")
    assert "data.workers" in str(caught.value.cure)
    assert time.monotonic() - began < PATIENCE
    assert len(workers) == 2
    assert gone(workers), "the other worker is sent home"
    assert not bench.stores()
    assert not bench.leftovers()
    assert len(bench.prepare()) == 500


def test_a_program_without_a_main_guard(bench: Bench, tmp_path: Path) -> None:
    """Workers do not import the program that started them, which here would prepare once more in each."""
    program = tmp_path / "program.py"
    program.write_text(BUILDER + "print('once')\n")
    words = [bench.data, bench.model, bench.cache, "", 0]
    done = subprocess.run(
        [sys.executable, str(program), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.count("once") == 1
    assert not done.stderr
