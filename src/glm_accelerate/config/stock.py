"""The stock scripts' YAML files (GLM-4, ChatGLM3) as they are: stock YAML -> RunConfig and notes.

Every key is mapped, noted with the reason why nothing follows from it, or refused by name. What the file
leaves out is as the stock trainer has it: a step learns from as many samples, at the same rate.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from glm_accelerate.config.load import read_text
from glm_accelerate.config.stock_keys import DATA, PEFT
from glm_accelerate.config.strict_yaml import read_document
from glm_accelerate.config.trainer import (
    Imported,
    Reading,
    checkpoints,
    evaluations,
    length,
    optimizer,
    report_to,
    rest,
    sharding,
    step,
)

SWANLAB = ("local", "cloud", "disabled")
SECTIONS = ("data_config", "training_args", "peft_config", "generation_config")


def load_stock(
    yaml_path: str | Path, data_dir: str | Path, model_dir: str | Path, ranks: int = 1
) -> Imported:
    """Read a stock file; `ranks` is how many devices the stock run had, for the samples in its step."""
    path = Path(yaml_path)
    document = read_document(read_text(path), str(path))
    reading = Reading(document, _flat(document.values))
    reading.settle("model.path", str(model_dir))
    _data(reading, Path(data_dir))
    step(reading, ranks)
    optimizer(reading)
    steps = length(reading)
    checkpoints(reading, steps)
    evaluations(reading, steps)
    _adapter(reading)
    sharding(reading, path.parent)
    sinks(reading)
    rest(reading)
    return reading.imported()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`training_args.learning_rate` -> value; a key without a value is left out, as it says nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _data(reading: Reading, directory: Path) -> None:
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
    if "combine" in reading.file.values:
        why = "only the last answer is learnt" if last else "every answer is learnt"
        reading.settle("data.train_on", "last" if last else "all", "combine", why)


def _adapter(reading: Reading) -> None:
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


def _targets(reading: Reading) -> None:
    key = f"{PEFT}target_modules"
    targets = reading.take(key)
    if targets is None:
        reading.settle("adapt.targets", ["query_key_value"])
        reading.note(key, "not said: query_key_value, as peft has it for ChatGLM")
    elif isinstance(targets, str) and targets != "all-linear":
        raise reading.refuse(key, f'is the pattern "{targets}"', f"write a list: [{targets}]")
    else:
        reading.settle("adapt.targets", targets, key)


def sinks(reading: Reading) -> None:
    lab = reading.take("swanlab")  # the scripts' own key, beside the trainer's
    if lab is not None and lab not in SWANLAB:
        raise reading.refuse("swanlab", f"is {lab}", f"there are {', '.join(SWANLAB)}")
    if lab == "disabled":
        reading.note("swanlab", "disabled: nothing goes there")
    elif lab is not None:
        why = "online after `swanlab login`, else in the run"
        reading.settle("observe.sinks", ["swanlab"], "swanlab", why)
    report_to(reading, lab in ("local", "cloud"))
