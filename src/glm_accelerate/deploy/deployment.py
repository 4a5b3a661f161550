"""What a run needs of the machines that it is sent to, each amount with its reason, mostly its plan's."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from glm_accelerate.config.load import absolute, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.plan.hardware import HOST_CORES, Hardware
from glm_accelerate.plan.run_plan import Memory, RunPlan
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount, duration

PORT = 29500
GIB = 1 << 30
SPARE = 1.25  # of the host's memory that is foretold: data is read through it
SHARED = 256 << 20  # assumed: of /dev/shm for each rank, by which NCCL moves what no link between cards does
DISK = 1e8  # bytes a second, assumed: a network's disk on a bad day
MINUTE, HOUR = 60, 3600
LONGER = 3  # times as long as planned a job may take with all that interrupts it
WHERE = "/data"  # in containers: what this directory is here


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks for."""

    nodes: int
    ranks: int  # of all nodes
    image: str
    hours: float | None = None  # None: by the plan
    resource: str | None = None  # what clusters call the device, if not as they usually do
    secret: str | None = None  # the name of one whose keys become environment variables
    queue: str | None = None
    volcano: bool = False  # the queue is Volcano's, not Kueue's
    claim: str | None = None  # a volume's that is there already


@dataclass(frozen=True, slots=True)
class Deployment:
    """One job."""

    name: str  # as clusters allow names
    config: str  # YAML, with paths as where it runs
    home: PurePosixPath  # ... and the directory in which it runs
    run: str  # ... and its own
    asked: Asked
    kind: str  # of device, as torch calls it
    cores: int  # of each node, as all these
    memory: int
    shared: int  # of it, in /dev/shm
    disk: int
    seconds: int  # for the job with all its interruptions
    once: int  # ... for one start of it
    grace: int  # ... between a signal and the end
    evaluator: bool  # evaluations are another job's
    reasons: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Of each node."""
        return self.asked.ranks // self.asked.nodes

    def train(self, config: str, nodes: str = "", rendezvous: str = "") -> list[str]:
        """The command of each node."""
        words = ["glm-accelerate", "train", config, "--run", self.run, "--nproc", str(self.ranks)]
        words += ["--nnodes", nodes or str(self.asked.nodes)] if self.asked.nodes > 1 else []
        return [*words, "--rendezvous", rendezvous] if rendezvous and self.asked.nodes > 1 else words

    @property
    def evaluate(self) -> list[str]:
        """The command of an evaluator, which waits for the run to be there."""
        wait = 'trap "exit 75" TERM; until test -f "$0/config.yaml"; do sleep 5; done; '
        trust = " --trust" if ".py:" in self.config else ""  # a metric of the user's own
        wait += f'exec glm-accelerate evaluate "$0" --follow{trust}'
        return ["sh", "-c", wait, self.run]


def deployment_of(
    config: RunConfig,
    name: str,
    asked: Asked,
    hardware: Hardware,
    foretold: tuple[RunPlan, Memory, float | None, int],
    home: PurePosixPath | None = None,
) -> Deployment:
    """By what is foretold: the plan, its memory, its seconds, the bytes of the model's files. `home`: where
    this directory is there.
    """
    plan, needs, seconds, files = foretold
    where = home or PurePosixPath(Path.cwd())
    if asked.ranks % asked.nodes:
        raise UserError(f"{asked.ranks} devices cannot be shared by {asked.nodes} nodes alike")
    if seconds is None and asked.hours is None:
        raise UserError("how long it takes is not known", cure="--hours N, or a device by name: --gpu NAME")
    ranks, on_cpu = asked.ranks // asked.nodes, hardware.device == "cpu"
    host = needs.needed if on_cpu else needs.host
    shared = _up(GIB + ranks * SHARED, GIB)
    memory = _up(SPARE * host * ranks + shared, GIB)
    disk = _up(SPARE * (needs.total("disk") + files) + 10 * GIB, GIB)
    saved = needs.total("disk") / (config.checkpoint.keep_last + config.checkpoint.keep_best + 1)
    cores = hardware.cores if on_cpu else HOST_CORES * ranks
    step = (seconds or 0.0) / max(1, plan.steps)
    grace = _up(MINUTE + 2 * step + saved / DISK, 30)
    planned = seconds if asked.hours is None else asked.hours * HOUR
    assert planned is not None
    total = _up(planned * (LONGER if asked.hours is None else 1) + HOUR * (asked.hours is None), MINUTE)
    once = min(total, _up(planned * SPARE + HOUR / 2, MINUTE))
    took = "as asked for" if asked.hours is not None else f"the plan's {duration(planned)}"
    reasons = (
        f"cores {cores}: {'as many as here' if on_cpu else f'assumed, {HOST_CORES} beside each device'}",
        f"memory {amount(memory)}: {ranks} x {amount(host)} by the plan, a quarter more, and /dev/shm",
        f"/dev/shm {amount(shared)}: assumed, what ranks of a node exchange",
        f"disk {amount(disk)}: checkpoints of {amount(needs.total('disk'))} and the model's files of "
        f"{amount(files)}, a quarter more, and 10 GiB",
        f"time {duration(total)}: {took}{'' if asked.hours else ', three times as long, and an hour'}",
        f"grace {duration(grace)}: two steps, {amount(saved)} at 100 MB/s, and a minute",
    )
    return Deployment(
        _as_label(name),
        to_yaml(absolute(config)) if home is None else _moved(config, Path.cwd(), home),
        where,
        str(where / "runs" / name),
        asked,
        hardware.device,
        cores,
        memory,
        shared,
        disk,
        total,
        once,
        grace,
        plan.evaluate_where == "external",
        reasons,
    )


def _as_label(name: str) -> str:
    """Lower-case letters, digits and dashes."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


def _moved(config: RunConfig, here: Path, there: PurePosixPath) -> str:
    """The config with all paths below `here` as they are called below `there`."""
    dumped = absolute(config).model_dump(mode="json")

    def move(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: move(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [move(inner, key) for inner in value]
        if not isinstance(value, str) or not value.startswith("/") or value.startswith(f"{there}/"):
            return value
        if not Path(value).is_relative_to(here):
            what = f"{value} is not below this directory, which is all that the job sees, as {there}"
            raise UserError(what, where=key, cure="go to a directory above it, or put it below this one")
        return str(there / Path(value).relative_to(here))

    return to_yaml(RunConfig.model_validate(move(dumped, "")))


def _up(value: float, grain: int) -> int:
    return math.ceil(value / grain) * grain
