"""What is wrong with a config, in one line: file:line, the key, what is expected, the nearest name.

pydantic finds the mistakes; this file says them the way a colleague would.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.strict_yaml import Document, KeyPath
from glm_accelerate.runtime.errors import UserError

# Words of other trainers, and how they are called here.
ELSEWHERE = {
    "batch_size": "train.step_samples",
    "cutoff_len": "data.max_tokens",
    "deepspeed": "parallel.shard",
    "epoch": "train.epochs",
    "eval_steps": "evaluate.every",
    "gradient_accumulation_steps": "train.step_samples",
    "gradient_checkpointing": "memory.recompute",
    "lora_alpha": "adapt.alpha",
    "lora_dropout": "adapt.dropout",
    "lora_rank": "adapt.rank",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip",
    "max_length": "data.max_tokens",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "optimizer": "optim.name",
    "per_device_train_batch_size": "train.step_samples",
    "pre_seq_len": "adapt.prefix_tokens",
    "r": "adapt.rank",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "target_modules": "adapt.targets",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
}

WANTED = {
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
    """The config that the document says; its first mistake, and how many more, if it has any."""
    values = {key: {} if _is_empty_section(key, value) else value for key, value in document.values.items()}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _complaint(error, document) from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def _is_empty_section(key: str, value: object) -> bool:
    """`evaluate:` with nothing below it says that all stays as it is."""
    return value is None and key in RunConfig.model_fields


def _complaint(error: ValidationError, document: Document) -> UserError:
    groups: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for found in error.errors(include_url=False):
        groups.setdefault(_said(found, document), []).append(found)
    # In the order of the text; what is missing stands nowhere and comes last.
    order = {path: i for i, path in enumerate(document.places)}
    path = min(groups, key=lambda path: order.get(path, len(order)))
    what, cure = _explain(path, groups[path])
    others = len(groups) - 1
    if others:
        what += f"; {others} more {'mistake' if others == 1 else 'mistakes'} after this"
    return UserError(what, where=document.place(path), cure=cure)


def _said(found: Mapping[str, Any], document: Document) -> KeyPath:
    """Where the mistake lies, without the tags that pydantic adds for the members of a union."""
    path: KeyPath = tuple(found["loc"])
    if found["type"] == "missing" and isinstance(path[-1], str):
        return path
    while path and path not in document.places:
        path = path[:-1]
    return path or tuple(found["loc"])


def _explain(path: KeyPath, errors: list[Mapping[str, Any]]) -> tuple[str, str | None]:
    name = ".".join(str(part) for part in path)
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _unknown(path)
    if first["type"] == "missing" and path == first["loc"]:
        kind = "section" if len(path) == 1 else "key"
        return f"the {kind} `{name}` is missing", f"say `{name}{': {...}' if len(path) == 1 else '=...'}`"
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return f"`{name}`: {said}" if name else said, "remove one" if said.endswith("not both") else None
    wanted = FILES if path[:2] in SOURCES else _any_of(errors)
    return f"`{name}` is {_shown(first['input'])}, expected {wanted}", _hint(first["input"], errors)


def _any_of(errors: list[Mapping[str, Any]]) -> str:
    words = list(dict.fromkeys(word for error in errors for word in _wanted(error)))
    before = "one of " if len(words) > 2 and all(one["type"] == "literal_error" for one in errors) else ""
    return before + (f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0])


def _wanted(error: Mapping[str, Any]) -> list[str]:
    kind: str = error["type"]
    if kind == "literal_error":
        return re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        bound = error["ctx"][name]
        return [f"{words} {f'{bound:g}' if isinstance(bound, float) else bound}"]
    return [WANTED.get(kind, str(error["msg"]))]


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
    key = str(path[-1])
    if len(path) == 1:
        return _unknown_section(key)
    section = str(path[0])
    own = _keys(section) if len(path) == 2 else ["path", "weight"]
    what = f"`{'.'.join(map(str, path[:-1]))}` has no key `{key}`"
    homes = [name for name in RunConfig.model_fields if name != section and key in _keys(name)]
    if homes:
        return what, f"`{key}` belongs under `{homes[0]}`"
    if key in ELSEWHERE:
        return what, _did_you_mean(ELSEWHERE[key], section)
    close = nearest(key, own)
    if close is not None:
        return what, f"did you mean `{close}`?"
    everywhere = {f"{name}.{field}": field for name in RunConfig.model_fields for field in _keys(name)}
    close = nearest(key, everywhere.values())
    if close is not None:
        return what, f"did you mean `{next(k for k, field in everywhere.items() if field == close)}`?"
    return what, f"it has {', '.join(own)}"


def _unknown_section(key: str) -> tuple[str, str | None]:
    what = f"there is no section `{key}`"
    homes = [name for name in RunConfig.model_fields if key in _keys(name)]
    if homes:
        return what, f"`{key}` belongs under `{homes[0]}`"
    if key in ELSEWHERE:
        return what, f"did you mean `{ELSEWHERE[key]}`?"
    close = nearest(key, RunConfig.model_fields)
    return what, f"did you mean `{close}`?" if close else f"there are {', '.join(RunConfig.model_fields)}"


def _did_you_mean(dotted: str, section: str) -> str:
    return f"did you mean `{dotted.removeprefix(section + '.')}`?"


def _keys(section: str) -> list[str]:
    field = RunConfig.model_fields.get(section)
    model = None if field is None else field.annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
