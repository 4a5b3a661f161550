"""The arguments of Hugging Face's trainer, as the stock scripts' YAML files and LLaMA-Factory's say them:
keys -> settings of a RunConfig, and a note for each. A key that nobody knows is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm_accelerate.config.complain import nearest, validate
from glm_accelerate.config.deepspeed import read_deepspeed
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.stock_keys import ARGS, DEFAULTS, NOTED, ONLY, OPTIMIZERS, SAME, SCHEDULES
from glm_accelerate.config.strict_yaml import Document, KeyPath
from glm_accelerate.runtime.errors import UserError

SINKS = ("tensorboard", "swanlab")


@dataclass(frozen=True, slots=True)
class Note:
    """What one stock key means here: `ours` is `section.key=value`, or empty if nothing follows from it."""

    key: str
    ours: str
    why: str


@dataclass(frozen=True, slots=True)
class Imported:
    """The config that another tool's file means, and what each of its keys means."""

    config: RunConfig
    notes: tuple[Note, ...]


class Reading:
    """The keys of a file that are still to be read, and what has been settled so far. The trainer's arguments
    are known as `training_args.KEY`, which is how the stock scripts write them; `bare`: this file does not.
    """

    def __init__(self, file: Document, left: dict[str, Any], *, bare: bool = False) -> None:
        self.file, self.left, self.bare = file, left, bare
        self.settings: dict[str, dict[str, Any]] = {}
        self.places: dict[KeyPath, str] = {}
        self.notes: list[Note] = []
        for ours, value in DEFAULTS.items():
            self.settle(ours, value)

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def place(self, key: str) -> str:
        return self.file.place(self._path(key))

    def written(self, key: str) -> bool:
        return self._path(key) in self.file.places

    def _path(self, key: str) -> KeyPath:
        return tuple((key.removeprefix(ARGS) if self.bare else key).split("."))

    def settle(self, ours: str, value: Any, key: str = "", why: str = "") -> None:
        """Set our value; `key` is the file's key that it comes from."""
        section, name = ours.split(".")
        self.settings.setdefault(section, {})[name] = value
        if key:
            self.places[section, name] = self.place(key)
            self.notes.append(Note(key, f"{ours}={value}", why))

    def copy(self, key: str, ours: str, known: Mapping[str, str] | None = None) -> None:
        """Set our value to that of one of the file, if it is there; `known` are our names for its values."""
        if key not in self.left:
            return
        value = self.take(key)
        if known is not None and str(value) not in known:
            raise self.refuse(key, f"is {value}, which is not offered", f"there are {', '.join(known)}")
        self.settle(ours, value if known is None else known[str(value)], key)

    def note(self, key: str, why: str) -> None:
        self.notes.append(Note(key, "", why))

    def refuse(self, key: str, what: str, cure: str | None = None) -> UserError:
        name = key.removeprefix(ARGS) if self.bare else key
        return UserError(f"`{name}` {what}", where=self.place(key), cure=cure)

    def imported(self) -> Imported:
        settled = Document(dict(self.settings), self.places, self.file.source)
        return Imported(validate(settled), tuple(self.notes))

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.take(key, default)
        if value is None:
            raise self.refuse(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, f"is {value}, expected a whole number from 1 on")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(key, f"is {value}, expected a number")
        return float(value)


def step(reading: Reading, ranks: int, packed: int | None = None) -> None:
    """`packed`: a sample of theirs is so many tokens of whatever documents."""
    key, more = f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"
    accumulates = more in reading.left
    batch, times = reading.whole(key, 8), reading.whole(more, 1)
    why = f"{batch} a device x {times} accumulated x {ranks} devices: as many samples a step as stock"
    if packed is None:
        reading.settle("train.step_samples", batch * times * ranks, key, why)
    else:
        reading.settle("train.step_tokens", batch * times * ranks * packed, key, f"{why}, each full")
    if accumulates:
        reading.note(more, f"see {key.removeprefix(ARGS)}")


def optimizer(reading: Reading) -> None:
    for key, ours in SAME.items():
        reading.copy(key, ours)
    reading.copy(f"{ARGS}optim", "optim.name", OPTIMIZERS)
    for i, key in enumerate((f"{ARGS}adam_beta1", f"{ARGS}adam_beta2")):
        if key in reading.left:
            betas = list(reading.settings["optim"]["betas"])
            betas[i] = reading.number(key, 0.0)
            reading.settle("optim.betas", betas, key)
    kind = reading.left.get(f"{ARGS}lr_scheduler_type", "linear")
    reading.copy(f"{ARGS}lr_scheduler_type", "optim.schedule", SCHEDULES)
    for key in (f"{ARGS}warmup_ratio", f"{ARGS}warmup_steps"):  # stock: steps win
        if key not in reading.left:
            continue
        warmup = reading.number(key, 0.0)
        if kind == "constant":
            reading.note(key, "stock's `constant` schedule has no warm-up")
        elif warmup > 0 or key.endswith("ratio"):
            reading.settle("optim.warmup", warmup, key)
        else:
            reading.note(key, "0: no warm-up, or as warmup_ratio says")
    reading.note(
        "(what is not said)",
        "as the stock trainer: AdamW (0.9, 0.999, 1e-8), rate 5e-5, linear schedule without warm-up, "
        "no weight decay, clip 1.0, seed 42",
    )


def length(reading: Reading) -> int | None:
    """The steps of the run, if the file says them: they win over epochs."""
    steps, epochs = int(reading.number(f"{ARGS}max_steps", -1)), f"{ARGS}num_train_epochs"
    if steps > 0:
        reading.settle("train.steps", steps, f"{ARGS}max_steps")
        if reading.take(epochs) is not None:
            reading.note(epochs, "max_steps wins")
        return steps
    if reading.written(f"{ARGS}max_steps"):
        reading.note(f"{ARGS}max_steps", "-1: num_train_epochs says how long")
    written = epochs in reading.left
    reading.settle("train.epochs", reading.number(epochs, 3.0), epochs if written else "")
    return None


def _every(reading: Reading, key: str, default: float, steps: int | None) -> int:
    """A number of steps, which stock may also say as a share of the run."""
    value = reading.number(key, default)
    if 0 < value < 1:
        if steps is None:
            raise reading.refuse(key, f"is {value}, a share of a run whose steps are not said", "write steps")
        return math.ceil(value * steps)
    return int(value)


def checkpoints(reading: Reading, steps: int | None) -> None:
    key, often = f"{ARGS}save_strategy", f"{ARGS}save_steps"
    written = key in reading.left
    strategy = str(reading.take(key, "steps"))
    if strategy != "steps":
        reading.take(often)
        reading.settle("checkpoint.every", "auto", key, f"`{strategy}`: how often is chosen here")
        return
    reading.settle("checkpoint.every", _every(reading, often, 500, steps), often)
    if written:
        reading.note(key, "see save_steps")


def evaluations(reading: Reading, steps: int | None) -> None:
    spelled = [key for key in (f"{ARGS}eval_strategy", f"{ARGS}evaluation_strategy") if key in reading.left]
    strategy = str([reading.take(key) for key in spelled][-1]) if spelled else "no"
    key = spelled[-1] if spelled else "(no eval_strategy)"
    often = f"{ARGS}eval_steps"
    if strategy == "steps":
        default = reading.left.get(f"{ARGS}logging_steps", 500)
        reading.settle("evaluate.every", _every(reading, often, default, steps), often)
        reading.note(key, "on as many samples of data.dev as tell steps apart; evaluate.samples fixes it")
        return
    reading.take(often)
    if strategy == "no":
        reading.settle("data.dev", None, key, "stock does not evaluate")
    else:
        reading.settle("evaluate.every", "auto", key, f"`{strategy}`: ten times a run")


def sharding(reading: Reading, beside: Path) -> None:
    key = f"{ARGS}deepspeed"
    value = reading.take(key)
    if value is not None:
        optim, train = reading.settings["optim"], reading.settings["train"]
        shard, why = read_deepspeed(value, beside, reading.place(key), {**optim, **train})
        reading.settle("parallel.shard", shard, key, why)
    key = f"{ARGS}fsdp"
    value = reading.take(key)
    if value:
        if not str(value).startswith("full_shard"):
            raise reading.refuse(key, f"is {value}", "full_shard is offered, or nothing")
        reading.settle("parallel.shard", "full", key)


def report_to(reading: Reading, lab: bool) -> None:
    """Where events go besides the run. `lab`: SwanLab was asked for by another key."""
    key = f"{ARGS}report_to"
    value = reading.take(key)
    if value is None:
        return
    names = [str(name) for name in cast("list[Any]", value if isinstance(value, list) else [value])]
    for name in names:
        if name not in (*SINKS, "none", "all"):
            raise reading.refuse(key, f"names {name}", "tensorboard and swanlab are offered, or none")
    offered = [name for name in names if name in SINKS]
    if lab and "swanlab" not in offered:
        offered.append("swanlab")
    reading.settle("observe.sinks", offered, key, "events.jsonl is written in every case")


def rest(reading: Reading, noted: Mapping[str, str] = NOTED, only: Mapping[str, Any] = ONLY) -> None:
    """What changes nothing is noted, or refused at other values; what is not known is refused."""
    for key, value in reading.left.items():
        if key in noted:
            reading.note(key, noted[key])
        elif key in only:
            if value not in only[key]:
                raise reading.refuse(key, f"is {value}, which is not offered", "remove it")
            reading.note(key, "this changes nothing")
        else:
            known = [*noted, *only, *SAME, f"{ARGS}max_steps", f"{ARGS}save_steps", f"{ARGS}eval_steps"]
            close = nearest(key, known)
            cure = f"did you mean `{close}`?" if close else "remove it, or write a config of our own"
            raise reading.refuse(key, "is not understood", cure)
