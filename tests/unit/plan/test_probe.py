"""What a run takes besides tensors, and its speed, are measured in a child and asked for once."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan import probe, resolve
from glm_accelerate.plan.cost import Speed
from glm_accelerate.plan.ground import MachineMeasurement, ground_of
from glm_accelerate.plan.hardware import as_hardware, detect, find_device
from glm_accelerate.plan.probe import Answer, measured_ground, short
from glm_accelerate.plan.resolve import plan_and_weigh
from glm_accelerate.plan.weigh import duration

SLOW = Speed(1e11, 1e12, "")
NINE_B = Sizes(151_552, 4096, 13_696, 40, 32, 2, 128, 1e-5, 1e4, 64, False, 131_072, sandwich=True)


@pytest.fixture
def on_cpu(tiny_run: dict[str, Any]) -> RunConfig:
    return override(RunConfig.model_validate(tiny_run), ["train.steps=3"])


@pytest.fixture(autouse=True)
def unmeasured() -> None:
    """What runs are measured is what these are of."""


def test_a_run_is_measured_once_and_planned_with_it(
    on_cpu: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "WORTH", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('a module of where we happen to be')")
    ground = ground_of(on_cpu, replace(detect(), device="cpu"))
    heard: list[str] = []
    (found,) = measured_ground(on_cpu, ground, lambda what, done, total: heard.append(what)).measured
    assert [what.split()[0] for what in heard] == ["measuring"]
    assert found is not None
    assert 2**26 < found.process < 2**32
    monkeypatch.setattr(probe, "CHILD", "no.such.module")
    slower = override(on_cpu, ["optim.learning_rate=1.0e-4"])
    again = measured_ground(slower, ground, lambda what, done, total: heard.append(what))
    assert len(heard) == 1
    assert again.measured == (found,)
    assert again.hardware.core_products * (ground.hardware.threads or 1) == pytest.approx(found.products)
    plan, weighed = plan_and_weigh(on_cpu, again)
    assert plan.memory is not None
    process = next(item for item in plan.memory.items if item.what == "process")
    assert (process.bytes, process.why.split()[0]) == (found.process, "measured")
    taken = duration(weighed)
    assert taken.seconds is not None
    assert taken.seconds > found.first
    assert "measured" in taken.why
    (kept,) = (tmp_path / "measured").iterdir()
    kept.write_text("{")
    assert measured_ground(on_cpu, ground).measured == ()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are copies of one process on Linux alone")
def test_ranks_are_measured_as_copies_that_train_at_the_same_time(
    on_cpu: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "WORTH", 0.0)
    here = replace(detect(), device="cpu")
    (alone,) = measured_ground(on_cpu, ground_of(on_cpu, here)).measured
    (copied,) = measured_ground(on_cpu, ground_of(on_cpu, here, ranks=2)).measured
    assert (alone.together, copied.together) == (1, 2)
    assert (
        copied.process < alone.process - 2**25
    )  # a copy has mapped none of the libraries' code that only loading runs


def test_a_speed_that_was_measured_among_as_many_is_shared_no_further(on_cpu: RunConfig) -> None:
    here = replace(detect(), device="cpu", cores=2, threads=1)
    measured = MachineMeasurement("eager", 0, 0, 3e10, 3e10, 0.0, 0.0, together=4)
    ground = replace(ground_of(on_cpu, here, ranks=4), measured=(measured,))
    among = {ranks: replace(ground, ranks=ranks).speed("float32", "eager") for ranks in (2, 4, 8)}
    assert {ranks: speed.products for ranks, speed in among.items() if speed} == {2: 6e10, 4: 3e10, 8: 1.5e10}


@pytest.mark.process
def test_the_child_ends_with_whoever_asks(tmp_path: Path) -> None:
    """A rank that starts is killed by a signal, with no time to see to it."""
    (tmp_path / "child.py").write_text(
        "import os, pathlib, time\n"
        "def main():\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'number').write_text(f'{{os.getpid()}} ')\n"
        "    time.sleep(600)\n"
    )
    asks = "from glm_accelerate.plan import probe; probe.CHILD = 'child'; probe._ask('{}')"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "GLM_ACCELERATE_CACHE": str(tmp_path / "cache")}
    number = tmp_path / "number"
    with subprocess.Popen([sys.executable, "-c", asks], env=env) as parent:
        while not (number.is_file() and number.read_text().endswith(" ")):
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
    child = Path("/proc", number.read_text().strip(), "stat")
    with suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        while child.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)


def test_what_is_short_or_elsewhere_or_cannot_be_started_is_assumed(
    on_cpu: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "CHILD", "no.such.module")
    here = ground_of(on_cpu, replace(detect(), device="cpu"))
    assert measured_ground(on_cpu, here) is here  # short
    monkeypatch.setattr(probe, "WORTH", 0.0)
    assert measured_ground(on_cpu, here).measured == ()
    elsewhere = ground_of(on_cpu, as_hardware(find_device("RTX 4090"), 1))
    assert measured_ground(on_cpu, elsewhere) is elsewhere


def test_a_large_model_is_measured_on_fewer_tokens() -> None:
    job = Job(NINE_B, pass_tokens=2048, longest=1024, learnt=2000, ranks=2, shards=2, passes=2)
    small, work = short(job, SLOW)
    assert (small.sizes.layers, small.ranks, small.shards, small.passes) == (2, 1, 1, 2)
    assert small.pass_tokens < 2048
    assert small.pass_tokens % 64 == 0
    assert small.longest <= small.pass_tokens
    assert small.learnt <= small.pass_tokens
    assert work.tokens == 2 * small.pass_tokens


def test_the_form_that_is_planned_is_the_one_that_was_measured(
    on_cpu: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of one form makes another worth it, which is so fast that it would not be."""
    monkeypatch.setattr(probe, "WORTH", 0.0)
    monkeypatch.setattr(resolve, "WORTH_COMPILING", 1e-3)
    monkeypatch.setattr(resolve, "WORTH_NATIVE", 1e-3)
    ground = ground_of(on_cpu, replace(detect(), device="cpu"))

    def ask(asked: str, together: int, progress: object) -> Answer:
        whole = 1.0 if json.loads(asked)["job"]["form"] == "eager" else 1e-9
        return Answer(together, 2**29, whole, whole / 2, 0.9 * whole, whole)

    monkeypatch.setattr(probe, "_ask", ask)
    measured = measured_ground(on_cpu, ground)
    _, weighed = plan_and_weigh(on_cpu, measured)
    assert weighed.found.setting.job.form in [each.form for each in measured.measured]
