"""What is wrong with a config, in one line: file:line, the key, what is expected, the nearest name.

pydantic finds the mistakes; this file words them as a colleague would.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.strict_yaml import Document, KeyPath
from glm_accelerate.runtime.errors import UserError

# Our keys, and what other trainers call them.
OTHER_NAMES = {
    "adapt.alpha": "lora_alpha",
    "adapt.dropout": "lora_dropout",
    "adapt.prefix_tokens": "pre_seq_len",
    "adapt.rank": "lora_rank r",
    "adapt.targets": "target_modules",
    "checkpoint.every": "save_steps",
    "checkpoint.keep_last": "save_total_limit",
    "data.dev": "val_size split dev_share val_set_size split_dataset_ratio eval_dataset",
    "data.max_tokens": "cutoff_len max_length",
    "evaluate.every": "eval_steps",
    "memory.recompute": "gradient_checkpointing",
    "optim.clip": "max_grad_norm",
    "optim.learning_rate": "lr",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup": "warmup_ratio warmup_steps",
    "parallel.shard": "deepspeed",
    "train.epochs": "epoch num_train_epochs",
    "train.step_samples": "batch_size gradient_accumulation_steps per_device_train_batch_size",
    "train.steps": "max_steps",
}
ELSEWHERE = {name: ours for ours, names in OTHER_NAMES.items() for name in names.split()}

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a section of keys",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "missing": "one more item",
    "model_type": "a section of keys",
    "string_type": "text",
    "tuple_type": "a list",
}
SOURCES = (("data", "train"), ("data", "dev"))
FILES = "a file or a list of files, each with a path and a weight above 0, at most 1000"
BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "too_short": ("min_length", "at least this many items:"),
    "too_long": ("max_length", "at most this many items:"),
}


def validate(document: Document) -> RunConfig:
    """The document as a config, or an error with its first mistake and the number of the others."""
    values = {  # `evaluate:` with nothing below it leaves all as it is
        key: {} if value is None and key in RunConfig.model_fields else value
        for key, value in document.values.items()
    }
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _complaint(error, document) from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def _complaint(error: ValidationError, document: Document) -> UserError:
    groups: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for mistake in error.errors(include_url=False):
        groups.setdefault(_path(mistake, document), []).append(mistake)
    # In the order of the text; what is missing has no place and comes last.
    order = {path: i for i, path in enumerate(document.places)}
    path = min(groups, key=lambda path: order.get(path, len(order)))
    what, cure = _explain(path, groups[path])
    others = len(groups) - 1
    if others:
        what += f"; {others} more {'mistake' if others == 1 else 'mistakes'} after this"
    return UserError(what, where=document.place(path), cure=cure)


def _path(mistake: Mapping[str, Any], document: Document) -> KeyPath:
    """The key that is wrong, without the tags that pydantic adds for the members of a union."""
    path: KeyPath = tuple(mistake["loc"])
    if mistake["type"] == "missing" and isinstance(path[-1], str):
        return path
    while path and path not in document.places:
        path = path[:-1]
    return path or tuple(mistake["loc"])


def _explain(path: KeyPath, errors: list[Mapping[str, Any]]) -> tuple[str, str | None]:
    name = ".".join(str(part) for part in path)
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _unknown(path)
    if first["type"] == "missing" and path == first["loc"]:
        kind = "section" if len(path) == 1 else "key"
        return f"the {kind} `{name}` is missing", f"say `{name}{': {...}' if len(path) == 1 else '=...'}`"
    if first["type"] == "value_error":
        what = str(first["ctx"]["error"])
        return f"`{name}`: {what}" if name else what, "remove one" if what.endswith("not both") else None
    expected = FILES if path[:2] in SOURCES else _any_of(errors)
    return f"`{name}` is {_shown(first['input'])}, expected {expected}", _hint(first["input"], errors)


def _any_of(errors: list[Mapping[str, Any]]) -> str:
    words = list(dict.fromkeys(word for error in errors for word in _expected(error)))
    before = "one of " if len(words) > 2 and all(one["type"] == "literal_error" for one in errors) else ""
    return before + (f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0])


def _expected(error: Mapping[str, Any]) -> list[str]:
    kind: str = error["type"]
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        bound = error["ctx"][name]
        return [f"{words} {f'{bound:g}' if isinstance(bound, float) else bound}"]
    return [EXPECTED.get(kind, str(error["msg"]))]


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(value: object, errors: list[Mapping[str, Any]]) -> str | None:
    kinds = {error["type"] for error in errors}
    if isinstance(value, str) and kinds & {"int_type", "float_type"}:
        try:
            float(value)
        except ValueError:
            return None
        plain = value.replace("_", "")  # which YAML takes for text, quoted or not
        return f"write {plain}" if plain != value else f"remove the quotes: {value}"
    if isinstance(value, float) and value.is_integer() and kinds & {"int_type", "int_from_float"}:
        return f"write {int(value)}"
    return None


def _unknown(path: KeyPath) -> tuple[str, str | None]:
    key, section = str(path[-1]), str(path[0]) if len(path) > 1 else ""
    if section:
        what = f"`{'.'.join(map(str, path[:-1]))}` has no key `{key}`"
        known = _keys(section) if len(path) == 2 else ["path", "weight"]
    else:
        what, known = f"there is no section `{key}`", list(RunConfig.model_fields)
    homes = [name for name in RunConfig.model_fields if name != section and key in _keys(name)]
    if homes:
        return what, f"`{key}` belongs under `{homes[0]}`"
    meant = ELSEWHERE[key].removeprefix(f"{section}.") if key in ELSEWHERE else nearest(key, known)
    if meant is None and section:
        everywhere = [(field, f"{name}.{field}") for name in RunConfig.model_fields for field in _keys(name)]
        close = nearest(key, (field for field, _ in everywhere))
        meant = next((dotted for field, dotted in everywhere if field == close), None)
    if meant is not None:
        return what, f"did you mean `{meant}`?"
    return what, f"{'it has' if section else 'there are'} {', '.join(known)}"


def _keys(section: str) -> list[str]:
    field = RunConfig.model_fields.get(section)
    model = None if field is None else field.annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
