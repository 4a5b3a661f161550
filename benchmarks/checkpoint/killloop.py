"""Random SIGKILLs over a real run (dropout, packing, several epochs): does it end as if nothing had happened?

python -m benchmarks.checkpoint.killloop [--kills 50] [--jobs 1 2 3 3/3] [--work DIR] [--out DIR]
A job is a number of ranks, ranks/shards, or ranks/AXIS=SIZE,AXIS=SIZE. A fifth of the kills come while it
starts, the others within two intervals after its first step. What ends is started again with the same words,
as a person would.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.report import Origin, origin, page, publish, table
from glm_accelerate.checkpoint.find import candidates
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS, step_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.demo.show import write_all
from glm_accelerate.observe.events import BEGINNINGS, read_events

STEPS, EVERY, EVALUATE = 500, 10, 50
SAMPLES, STEP_SAMPLES = 2400, 24  # 100 steps an epoch
SETTINGS = [
    f"train.steps={STEPS}",
    f"train.step_samples={STEP_SAMPLES}",
    f"checkpoint.every={EVERY}",
    f"evaluate.every={EVALUATE}",
    "evaluate.metrics=[loss]",
    "adapt.method=lora",
    "adapt.dropout=0.1",
    "data.batching=pack",
]
EARLY = 0.2  # of the kills: while the job starts
LATEST = 2.0  # intervals after a life's first step
SAME = ("applied", "epoch", "loss", "samples", "tokens", "targets", "learning_rate", "grad_norm")
PHASES = ("starting", "training", "evaluating", "a save in flight")

ABOUT = f"""\
The demo's tiny GLM-4, LoRA with dropout 0.1, {SAMPLES:,} samples packed {STEP_SAMPLES} a step: {STEPS} steps,
{STEPS * STEP_SAMPLES / SAMPLES:g} epochs. Every {EVERY} steps a checkpoint, written behind the training,
every {EVALUATE} an evaluation; one thread a rank. With several ranks the launcher or one of them is killed.

- **ranks**: `3/3` is three ranks with FSDP over three, `3` three copies, `4/tensor=2,pipeline=2` two stages
  of two ranks that share products.
- **equal**: to the same command left alone, to the last bit: what is trained, AdamW's moments, the resume
  state, the losses of evaluations, and of each step {", ".join(SAME[:4])},
  {", ".join(SAME[4:])}.
- **starts**: of the command; the launcher starts ranks again by itself.
- **kills**: all, and by what the run was at: {", ".join(PHASES)}.
- **most lost**: steps that a life had to do again. A save protects once it is published: what is trained
  while it is written is lost with it, and would be **beyond an interval** of {EVERY} steps.
- **skipped**: saves left out because the one before was still being written.
- **interval**, **save**: seconds of {EVERY} steps left alone; from a save's beginning until it is published
  (median, longest).
"""


@dataclass(frozen=True)
class Job:
    """Ranks, and how they share what is trained."""

    ranks: int
    layout: str

    @staticmethod
    def of(word: str) -> "Job":
        ranks, _, layout = word.partition("/")
        return Job(int(ranks), layout)

    def __str__(self) -> str:
        return f"{self.ranks}/{self.layout}" if self.layout else str(self.ranks)

    def command(self, config: Path, run: Path) -> list[str]:
        words = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(config), *SETTINGS]
        axes = [each if "=" in each else f"shard={each}" for each in (self.layout or "1").split(",")]
        return [*words, *(f"parallel.{axis}" for axis in axes), "--run", str(run), "--nproc", str(self.ranks)]


@dataclass(frozen=True)
class Pace:
    """Of a run left alone: seconds to the first step, and between two saves."""

    start: float
    interval: float


@dataclass
class Tally:
    """What was done to a run."""

    starts: int = 0
    kills: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True)
class Row:
    """How a job ended."""

    job: str
    differs: list[str]  # from the same command left alone
    starts: int
    kills: dict[str, int]
    lost: list[int]
    skipped: int
    pace: Pace
    saves: list[float]

    @property
    def beyond(self) -> int:
        return max(0, max(self.lost) - EVERY)


def written(run: Path) -> list[dict[str, object]]:
    """Every event that was ever written, those of lives that were cut off too."""
    events: list[dict[str, object]] = []
    for line in (run / "events.jsonl").read_text(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return events


def ending(run: Path) -> dict[str, str]:
    """Digests of all that has to be equal."""
    newest = candidates(run).paths[0]
    assert step_of(newest.name) == STEPS
    reader, digests = Reader(newest), dict[str, str]()
    for group in (WEIGHTS, OPTIMIZER):
        names = sorted(reader.names(group))
        assert names
        tensors = hashlib.sha256()
        for name in names:
            tensors.update(name.encode() + reader.tensor(group, name).numpy().tobytes())
        digests[group] = tensors.hexdigest()
    events = read_events(run / "events.jsonl")
    steps = [[event[key] for key in ("step", *SAME)] for event in events if event["kind"] == "step"]
    assert [step for step, *_ in steps] == list(range(1, STEPS + 1))
    evaluations = [[event["step"], event["loss"]] for event in events if event["kind"] == "eval"]
    for name, content in (("state", reader.state()), ("steps", steps), ("evaluations", evaluations)):
        digests[name] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return digests


def lost(run: Path) -> list[int]:
    """Steps that each life had to do again."""
    repeated: list[int] = []
    newest = 0
    for event in written(run):
        step = event.get("step")
        assert isinstance(step, int) or event["kind"] == "warning"
        if event["kind"] in BEGINNINGS and isinstance(step, int):
            repeated.append(newest - step)
            newest = step
        elif event["kind"] == "step" and isinstance(step, int):
            newest = step
    return repeated


def saw(run: Path) -> tuple[int, int]:
    """The life and the number of the step told last."""
    path = run / "events.jsonl"
    lines = path.read_bytes()[-4096:].splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["kind"] == "step":
            return event["attempt"], event["step"]
    return 0, 0


def phase(run: Path, before: int) -> str:
    life, step = saw(run)
    if life <= before:
        return PHASES[0]
    if any(path.name.startswith(".checkpoint") for path in (run / "checkpoints").glob(".*")):
        return PHASES[3]
    last = written(run)[-1]
    evaluating = last["kind"] == "step" and step % EVALUATE == 0
    return PHASES[2] if evaluating else PHASES[1]


def await_moment(process: subprocess.Popen[bytes], run: Path, pace: Pace, drawn: random.Random) -> int:
    """Wait until it is to be killed, or has ended. Returns the last life that made a step before."""
    before = saw(run)[0]
    early, share = drawn.random() < EARLY, drawn.random()
    if not early:
        while saw(run)[0] == before and process.poll() is None:
            time.sleep(0.02)
    time.sleep(share * (pace.start if early else LATEST * pace.interval))
    return before


def kill_until(kills: int, job: Job, config: Path, run: Path, pace: Pace, drawn: random.Random) -> Tally:
    """Runs the command to its end through so many kills."""
    tally = Tally()
    run.mkdir()
    while True:
        tally.starts += 1
        assert tally.starts < 5 * kills + 5, "it gets nowhere"
        with (run / "log").open("ab") as log, start(job, config, run, log.fileno()) as process:
            while tally.kills.total() < kills and process.poll() is None:
                before = await_moment(process, run, pace, drawn)
                victims = [process.pid, *ranks_of(process.pid)]
                if process.poll() is None:
                    tally.kills[phase(run, before)] += 1
                    os.kill(drawn.choice(victims), signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return tally
        if process.returncode == 2:  # ranks without a launcher end their step, save, and leave
            time.sleep(1)


def start(job: Job, config: Path, run: Path, log: int) -> subprocess.Popen[bytes]:
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(config.parent)}
    return subprocess.Popen(job.command(config, run), stdout=log, stderr=log, env=surroundings)


def ranks_of(launcher: int) -> list[int]:
    """The processes that train, not torch's resource tracker."""
    ranks: list[int] = []
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        try:
            ranks += [int(child) for child in children.read_text().split() if trains(child)]
        except OSError:  # it has ended
            continue
    return ranks


def trains(process: str) -> bool:
    return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()


def survive(kills: int, job: Job, config: Path, work: Path) -> Row:
    """Once left alone, once killed."""
    name = str(job).replace("/", "-")
    whole, killed = work / f"whole-{name}", work / f"killed-{name}"
    whole.mkdir()
    began = time.time()
    with (whole / "log").open("wb") as log, start(job, config, whole, log.fileno()) as alone:
        assert alone.wait() == 0, (whole / "log").read_text()
    times = [float(str(event["time"])) for event in written(whole) if event["kind"] == "step"]
    pace = Pace(times[0] - began, (times[-1] - times[0]) / (STEPS - 1) * EVERY)
    tally = kill_until(kills, job, config, killed, pace, random.Random(str(job)))
    one, other = ending(whole), ending(killed)
    events = written(killed)
    return Row(
        job=str(job),
        differs=[name for name in one if one[name] != other[name]],
        starts=tally.starts,
        kills={name: tally.kills[name] for name in PHASES},
        lost=lost(killed),
        skipped=sum("still being written" in str(event.get("said")) for event in events),
        pace=pace,
        saves=[float(str(event["total_seconds"])) for event in events if event["kind"] == "checkpoint"],
    )


def markdown(source: Origin, rows: Sequence[Row]) -> str:
    def cells(row: Row) -> Sequence[object]:
        return (
            row.job,
            f"NO: {', '.join(row.differs)}" if row.differs else "yes",
            row.starts,
            sum(row.kills.values()),
            *row.kills.values(),
            f"{max(row.lost)} steps",
            row.beyond,
            row.skipped,
            f"{row.pace.interval:.2f} s",
            f"{median(row.saves):.2f} s, {max(row.saves):.2f} s",
        )

    columns = ("ranks", "equal", "starts", "kills", *PHASES)
    columns += ("most lost", "beyond an interval", "skipped", "interval", "save")
    body = table(columns, map(cells, sorted(rows, key=lambda row: row.job)), left=(0, 1))
    return page("Killed at random", source, [], ABOUT, body)


def write_config(directory: Path) -> Path:
    """The demo's lessons, so few that they are seen again and again."""
    write_all(directory, STEPS)
    train = directory / "data" / "train.jsonl"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[:SAMPLES]))
    return directory / "config.yaml"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Kill a run at random; it has to end as if left alone.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--jobs", type=Job.of, nargs="+", default=[Job(1, ""), Job(2, ""), Job(3, ""), Job(3, "3")]
    )
    parser.add_argument("--work", type=Path, help="directory for the runs, kept; default: a temporary one")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.checkpoint.killloop", *words], {"torch": torch.__version__})
    with ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="killloop-")))
        config = write_config(work / "demo")
        rows: list[Row] = []
        for job in given.jobs:
            rows.append(survive(given.kills, job, config, work))
            figures = {"rows": [asdict(row) for row in rows]}  # after each job: they take long
            publish(given.out, "checkpoint-killloop", source, markdown(source, rows), figures)


if __name__ == "__main__":
    main(sys.argv[1:])
