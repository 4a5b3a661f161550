"""The stock scripts' YAML files (GLM-4, ChatGLM3) as they are: stock YAML -> RunConfig and notes.

Every key is mapped, noted with the reason why nothing follows from it, or refused by name. What the file
leaves out is as the stock trainer has it: a step learns from as many samples, at the same rate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm_accelerate.config.complain import nearest, validate
from glm_accelerate.config.deepspeed import read_deepspeed
from glm_accelerate.config.load import read_text
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.stock_keys import (
    ARGS,
    DATA,
    DEFAULTS,
    NOTED,
    ONLY,
    OPTIMIZERS,
    PEFT,
    SAME,
    SCHEDULES,
)
from glm_accelerate.config.strict_yaml import Document, KeyPath, read_document
from glm_accelerate.runtime.errors import UserError

SWANLAB = ("local", "cloud", "disabled")
SINKS = ("tensorboard", "swanlab")
SECTIONS = ("data_config", "training_args", "peft_config", "generation_config")


@dataclass(frozen=True, slots=True)
class Note:
    """What one stock key means here: `ours` is `section.key=value`, or empty if nothing follows from it."""

    key: str
    ours: str
    why: str


@dataclass(frozen=True, slots=True)
class StockReading:
    """The config that a stock file means, and what each of its keys means."""

    config: RunConfig
    notes: tuple[Note, ...]


def load_stock(
    yaml_path: str | Path, data_dir: str | Path, model_dir: str | Path, ranks: int = 1
) -> StockReading:
    """Read a stock file; `ranks` is how many devices the stock run had, for the samples in its step."""
    path = Path(yaml_path)
    reading = _Reading(read_document(read_text(path), str(path)))
    reading.settle("model.path", str(model_dir))
    _data(reading, Path(data_dir))
    _step(reading, ranks)
    _optimizer(reading)
    steps = _length(reading)
    _checkpoints(reading, steps)
    _evaluations(reading, steps)
    _adapter(reading)
    _sharding(reading, path.parent)
    _sinks(reading)
    _rest(reading)
    settled = Document(dict(reading.settings), reading.places, reading.stock.source)
    return StockReading(validate(settled), tuple(reading.notes))


class _Reading:
    """The stock keys that are still to be read, and what has been settled so far."""

    def __init__(self, stock: Document) -> None:
        self.stock = stock
        self.left = _flat(stock.values)
        self.settings: dict[str, dict[str, Any]] = {}
        self.places: dict[KeyPath, str] = {}
        self.notes: list[Note] = []
        for ours, value in DEFAULTS.items():
            self.settle(ours, value)

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def place(self, key: str) -> str:
        return self.stock.place(tuple(key.split(".")))

    def settle(self, ours: str, value: Any, key: str = "", why: str = "") -> None:
        """Set our value; `key` is the stock key that it comes from."""
        section, name = ours.split(".")
        self.settings.setdefault(section, {})[name] = value
        if key:
            self.places[section, name] = self.place(key)
            self.notes.append(Note(key, f"{ours}={value}", why))

    def copy(self, key: str, ours: str, known: Mapping[str, str] | None = None) -> None:
        """Set our value to that of a stock key, if it is there; `known` are our names for its values."""
        if key not in self.left:
            return
        value = self.take(key)
        if known is not None and str(value) not in known:
            raise self.refuse(key, f"is {value}, which is not offered", f"there are {', '.join(known)}")
        self.settle(ours, value if known is None else known[str(value)], key)

    def note(self, key: str, why: str) -> None:
        self.notes.append(Note(key, "", why))

    def refuse(self, key: str, what: str, cure: str | None = None) -> UserError:
        return UserError(f"`{key}` {what}", where=self.place(key), cure=cure)

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


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`training_args.learning_rate` -> value; a key without a value is left out, as it says nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _data(reading: _Reading, directory: Path) -> None:
    for key, ours in ((f"{DATA}train_file", "data.train"), (f"{DATA}val_file", "data.dev")):
        name = reading.take(key)
        if name is None:
            continue
        reading.settle(ours, str(directory / str(name)), key)
    if "train" not in reading.settings.get("data", {}):
        raise reading.refuse(f"{DATA}train_file", "is missing")
    longest = [reading.whole(f"max_{part}_length") for part in ("input", "output")]
    why = "both lengths together; a longer sample loses its oldest turns, where stock cuts off the answer"
    reading.settle("data.max_tokens", sum(longest), "max_input_length", why)
    reading.note("max_output_length", "see max_input_length")
    last = bool(reading.take("combine", False))
    if "combine" in reading.stock.values:
        why = "only the last answer is learnt" if last else "every answer is learnt"
        reading.settle("data.train_on", "last" if last else "all", "combine", why)


def _step(reading: _Reading, ranks: int) -> None:
    key, more = f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"
    accumulates = more in reading.left
    batch, times = reading.whole(key, 8), reading.whole(more, 1)
    why = f"{batch} a device x {times} accumulated x {ranks} devices: as many samples a step as stock"
    reading.settle("train.step_samples", batch * times * ranks, key, why)
    if accumulates:
        reading.note(more, f"see {key.removeprefix(ARGS)}")


def _optimizer(reading: _Reading) -> None:
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


def _length(reading: _Reading) -> int | None:
    """The steps of the run, if the file says them: they win over epochs."""
    steps, epochs = int(reading.number(f"{ARGS}max_steps", -1)), f"{ARGS}num_train_epochs"
    if steps > 0:
        reading.settle("train.steps", steps, f"{ARGS}max_steps")
        if reading.take(epochs) is not None:
            reading.note(epochs, "max_steps wins")
        return steps
    if reading.stock.places.get(("training_args", "max_steps")):
        reading.note(f"{ARGS}max_steps", "-1: num_train_epochs says how long")
    written = epochs in reading.left
    reading.settle("train.epochs", reading.number(epochs, 3.0), epochs if written else "")
    return None


def _every(reading: _Reading, key: str, default: float, steps: int | None) -> int:
    """A number of steps, which stock may also say as a share of the run."""
    value = reading.number(key, default)
    if 0 < value < 1:
        if steps is None:
            raise reading.refuse(key, f"is {value}, a share of a run whose steps are not said", "write steps")
        return math.ceil(value * steps)
    return int(value)


def _checkpoints(reading: _Reading, steps: int | None) -> None:
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


def _evaluations(reading: _Reading, steps: int | None) -> None:
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


def _adapter(reading: _Reading) -> None:
    kind = reading.take(f"{PEFT}peft_type")
    if kind is None:
        reading.settle("adapt.method", "full")
        reading.note("peft_config", "not said: every weight is trained")
    elif str(kind).upper() == "LORA":
        reading.settle("adapt.method", "lora", f"{PEFT}peft_type")
        reading.settle("adapt.rank", reading.whole(f"{PEFT}r", 8), f"{PEFT}r")
        reading.settle("adapt.alpha", reading.number(f"{PEFT}lora_alpha", 8), f"{PEFT}lora_alpha")
        reading.settle("adapt.dropout", reading.number(f"{PEFT}lora_dropout", 0.0), f"{PEFT}lora_dropout")
        _targets(reading)
    elif str(kind).upper() == "PREFIX_TUNING":
        reading.settle("adapt.method", "prefix", f"{PEFT}peft_type")
        tokens = f"{PEFT}num_virtual_tokens"
        reading.settle("adapt.prefix_tokens", reading.whole(tokens, 0), tokens)
    else:
        cure = "LORA and PREFIX_TUNING are offered, or no peft_config to train every weight"
        raise reading.refuse(f"{PEFT}peft_type", f"is {kind}", cure)


def _targets(reading: _Reading) -> None:
    key = f"{PEFT}target_modules"
    targets = reading.take(key)
    if targets is None:
        reading.settle("adapt.targets", ["query_key_value"])
        reading.note(key, "not said: query_key_value, as peft has it for ChatGLM")
    elif isinstance(targets, str) and targets != "all-linear":
        raise reading.refuse(key, f'is the pattern "{targets}"', f"write a list: [{targets}]")
    else:
        reading.settle("adapt.targets", targets, key)


def _sharding(reading: _Reading, beside: Path) -> None:
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


def _sinks(reading: _Reading) -> None:
    lab = reading.take("swanlab")  # the scripts' own key, beside the trainer's
    if lab is not None and lab not in SWANLAB:
        raise reading.refuse("swanlab", f"is {lab}", f"there are {', '.join(SWANLAB)}")
    if lab == "disabled":
        reading.note("swanlab", "disabled: nothing goes there")
    elif lab is not None:
        why = "online after `swanlab login`, else in the run"
        reading.settle("observe.sinks", ["swanlab"], "swanlab", why)
    key = f"{ARGS}report_to"
    value = reading.take(key)
    if value is None:
        return
    names = [str(name) for name in cast("list[Any]", value if isinstance(value, list) else [value])]
    for name in names:
        if name not in (*SINKS, "none", "all"):
            raise reading.refuse(key, f"names {name}", "tensorboard and swanlab are offered, or none")
    offered = [name for name in names if name in SINKS]
    if lab in ("local", "cloud") and "swanlab" not in offered:
        offered.append("swanlab")
    reading.settle("observe.sinks", offered, key, "events.jsonl is written in every case")


def _rest(reading: _Reading) -> None:
    for key, value in reading.left.items():
        if key in NOTED:
            reading.note(key, NOTED[key])
        elif key in ONLY:
            if value not in ONLY[key]:
                raise reading.refuse(key, f"is {value}, which is not offered", "remove it")
            reading.note(key, "this changes nothing")
        else:
            known = [*NOTED, *ONLY, *SAME, f"{ARGS}max_steps", f"{ARGS}save_steps", f"{ARGS}eval_steps"]
            close = nearest(key, known)
            cure = f"did you mean `{close}`?" if close else "remove it, or write a config of our own"
            raise reading.refuse(key, "is not understood", cure)
