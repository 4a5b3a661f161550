"""The launcher's bad days: a rank that alone has something to say, and a disk on which nobody can."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import read_manifest
from glm_accelerate.runtime.env import cores
from tests.warm import Warm

Said = dict[str, Any]

FAULTY = '''
"""Ranks among which some come to a mistake in their third step."""
import os
import sys
from glm_accelerate.cli import main, train
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training import loop

right, one_rank = loop.train_step, train.one_rank


def train_step(passes, mover, step, *more):
    if step.number == 3:
        raise UserError("out of memory", where="step 3", cure="a smaller step")
    return right(passes, mover, step, *more)


def faulty(args):
    if os.environ["RANK"] in os.environ["FAULTY"].split():
        loop.train_step = train_step
    return one_rank(args)


train.one_rank = faulty
sys.exit(main.main())
'''
IMPATIENT = {"glm_accelerate.parallel.heartbeat.QUIET": 2.0, "glm_accelerate.parallel.heartbeat.LOST": 3.0}


@pytest.fixture
def words(tiny_run: Said, tmp_path: Path) -> list[str]:
    """Of a run of two ranks in tmp_path/run."""
    data = {name: value for name, value in tiny_run["data"].items() if name != "dev"}
    config = tmp_path / "ranks.yaml"
    config.write_text(yaml.safe_dump({**tiny_run, "data": data}))
    return ["train", str(config), "precision.compile=off", "--run", str(tmp_path / "run"), "--nproc", "2"]


@pytest.mark.parametrize("who", ["1", "0 1"])
def test_a_mistake_ends_the_job_and_is_said_once(
    who: str, words: list[str], warm: Callable[..., Warm]
) -> None:
    """Whichever rank comes to it, alone or all together: nothing is started again."""
    done = warm(*words, env=os.environ | {"FAULTY": who}, code=FAULTY).done()
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error: step 3: out of memory (a smaller step)") == 1
    assert "another rank" not in done.stderr
    assert "starting again" not in done.stderr


def test_each_rank_computes_with_its_share_of_the_cores(words: list[str], tmp_path: Path) -> None:
    """Whoever says nothing of threads: also ranks that are copies of a launcher which has loaded torch."""
    room = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    line = [sys.executable, "-m", "glm_accelerate.cli.main", *words, "train.steps=2"]
    subprocess.run(line, env=room, capture_output=True, timeout=120, check=True)
    (path,) = published(tmp_path / "run")
    assert read_manifest(path).fingerprints["threads"] == str(max(1, cores() // 2))


def fill(disk: Path) -> None:
    """So that no file can be made any more, also in the place of one that was being replaced."""
    for turn in range(5):
        with suppress(OSError):
            for number in itertools.count():
                (disk / f"ballast-{turn}-{number}").touch()
        time.sleep(0.05)


@pytest.fixture
def disk(mount: Callable[..., Path], tmp_path: Path) -> Path:
    """A small one for files of a moment, those of signs of life among them."""
    return mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64m,nr_inodes=200", "tmpfs")


@pytest.fixture
def job(words: list[str], disk: Path, tmp_path: Path, warm: Callable[..., Warm]) -> Warm:
    """A long one that trains, under an impatient launcher."""
    room, log = os.environ | {"TMPDIR": str(disk)}, tmp_path / "run" / "events.jsonl"
    job = warm(*words, "train.steps=100000", "checkpoint.every=50000", env=room, other=IMPATIENT)
    while not log.exists() or '"step"' not in log.read_text():
        assert job.poll() is None
        time.sleep(0.05)
    return job


def test_a_full_disk_kills_no_rank(job: Warm, disk: Path, tmp_path: Path) -> None:
    """Signs of life end, training does not; with room again they are back. The signal that stops the job is
    passed on while the disk is full.
    """
    fill(disk)
    time.sleep(4.5)
    for ballast in disk.glob("ballast-*"):
        ballast.unlink()
    time.sleep(1.5)
    ages = [time.time() - sign.stat().st_mtime for sign in disk.glob("glm-accelerate-*/rank-*.json")]
    fill(disk)
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 75, said
    assert len(ages) == 2
    assert max(ages) < 3
    assert len(re.findall("no signs of life can be written", said)) == 1
    assert "killing" not in said
    assert "starting again" not in said
    assert published(tmp_path / "run")


def test_a_full_disk_keeps_no_job_from_starting_again(job: Warm, disk: Path, tmp_path: Path) -> None:
    fill(disk)
    (sign,) = disk.glob("glm-accelerate-*/rank-1.json")
    os.kill(json.loads(sign.read_text())["process"], signal.SIGKILL)
    job.read_until("starting again")
    log = tmp_path / "run" / "events.jsonl"
    reached = log.read_text().count('"kind": "step"')
    while log.read_text().count('"kind": "step"') < reached + 2:
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert (job.communicate(timeout=120), job.returncode)[1] == 75


def test_who_failed_is_named_and_not_who_noticed(words: list[str], warm: Callable[..., Warm]) -> None:
    """A rank that is lost takes the others with it in seconds, which say so themselves."""
    crash = FAULTY.replace("raise UserError", "raise ZeroDivisionError").replace(
        '"out of memory", where="step 3", cure="a smaller step"', '"once more"'
    )
    done = warm(*words, "checkpoint.every=2", env=os.environ | {"FAULTY": "1"}, code=crash).done()
    assert done.returncode == 1
    assert len(re.findall(r"launcher: rank 1 \(process \d+\) ended by exit code 1", done.stderr)) >= 3
    assert "launcher: rank 0" not in done.stderr
    assert done.stderr.count("this is a bug") == done.stderr.count("ended by exit code 1")
