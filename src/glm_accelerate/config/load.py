"""One run's config: a YAML file or a preset, with values that the command line replaces.

Relative paths in a config are relative to the current directory, as in the stock scripts, not to the file.
"""

from collections.abc import Sequence
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

from glm_accelerate.config.complain import nearest, validate
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.sources import Source
from glm_accelerate.config.strict_yaml import (
    MOST_CHARACTERS,
    Document,
    KeyPath,
    check_size,
    read_document,
    read_value,
    write_document,
)
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import absolute_path, local_name

PRESET = "preset:"
COMMAND_LINE = "command line"
# Two ways to set one thing: on the command line, one replaces the other in the file.
EITHER = {"steps": "epochs", "epochs": "steps", "step_samples": "step_tokens", "step_tokens": "step_samples"}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file or `preset:NAME`; each override is `section.key=value`, its value read as YAML."""
    source = str(path)
    name = source.removeprefix(PRESET)
    text = read_text(Path(path)) if name == source else _preset(name)
    return validate(_overridden(read_document(text, source), overrides))


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A config with some values replaced, checked as a whole again."""
    return validate(_overridden(Document(config.model_dump(mode="json"), {}, COMMAND_LINE), overrides))


def to_yaml(config: RunConfig) -> str:
    """Every value, defaults included, as a run directory keeps it: `load_config` reads an equal config."""
    return write_document(config.model_dump(mode="json"))


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a config, for editors. `schema.json` beside this file holds it."""
    schema = RunConfig.model_json_schema()
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Source"}]}
    files = [*source["anyOf"], {"type": "array", "items": source, "minItems": 1}]
    properties = schema["$defs"]["DataSection"]["properties"]
    held_out = [*files, {"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]  # a string may be "2%"
    for key, choices in (("train", files), ("dev", held_out)):
        # pydantic shows the list that a lone file name becomes; people may write the name.
        properties[key] = {"anyOf": choices, "description": properties[key]["description"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def preset_names() -> list[str]:
    """The names that may follow `preset:`."""
    directory = resources.files("glm_accelerate.config") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in directory.iterdir())


def read_text(path: Path) -> str:
    """A text file as UTF-8, with or without a byte order mark, or an error that names what it is."""
    try:
        with path.open("rb") as file:  # a data file given by mistake may be very large
            data = file.read(4 * MOST_CHARACTERS + 1)
    except OSError as error:
        close = nearest(path.stem, preset_names())
        cure = f"or did you mean `{PRESET}{close}`?" if close and not path.exists() else None
        raise UserError(f"cannot be read: {error.strerror}", where=path, cure=cure) from error
    check_size(-(-len(data) // 4), str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"not UTF-8 text: byte 0x{data[error.start]:02x}",
            where=f"{path}:{line}",
            cure="save it as UTF-8; from GBK: iconv -f GBK -t UTF-8",
        ) from error


def absolute(config: RunConfig) -> RunConfig:
    """As a run keeps it: with absolute paths, so that every verb finds the same from any directory. A model
    that is no directory here is a hub's name.
    """
    model, data, metrics = config.model, config.data, config.evaluate.metrics
    return config.model_copy(
        update={
            "model": model.model_copy(update={"path": local_name(model.path)}),
            "data": data.model_copy(
                update={
                    "train": _absolute_sources(data.train),
                    "dev": _absolute_sources(data.dev) if isinstance(data.dev, list) else data.dev,
                    "cache": data.cache if data.cache == "auto" else absolute_path(data.cache),
                }
            ),
            "evaluate": config.evaluate.model_copy(
                update={"metrics": [absolute_path(name) if ".py:" in name else name for name in metrics]}
            ),
        }
    )


def _absolute_sources(sources: list[Source]) -> list[Source]:
    return [one.model_copy(update={"path": absolute_path(one.path)}) for one in sources]


def _preset(name: str) -> str:
    names = preset_names()
    if name not in names:
        close = nearest(name, names)
        hint = f"did you mean `{PRESET}{close}`? " if close else ""
        raise UserError(f"there is no preset `{name}`", cure=f"{hint}there are {', '.join(names)}")
    return (resources.files("glm_accelerate.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def _overridden(document: Document, overrides: Sequence[str]) -> Document:
    values, places = deepcopy(document.values), dict(document.places)
    parsed = [_parsed(text) for text in overrides]
    given = {path for path, _ in parsed}
    for (section, key), value in parsed:
        if values.get(section) is None:  # missing, or empty in the file
            values[section] = {}
        inside = values[section]
        if not isinstance(inside, dict):
            break  # the file's mistake: validation names it
        inside[key] = value
        other = EITHER.get(key) if section == "train" else None
        if other and value is not None and (section, other) not in given:
            inside.pop(other, None)
        here: KeyPath = (section, key)
        places = {path: place for path, place in places.items() if path[:2] != here}
        places[here] = COMMAND_LINE
        places.setdefault((section,), COMMAND_LINE)
    return Document(values, places, document.source)


def _parsed(text: str) -> tuple[tuple[str, str], Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key) or "." in key:
        raise UserError(f"`{text}` is not `section.key=value`", where=COMMAND_LINE)
    return (section, key), read_value(value, f"{COMMAND_LINE}: {name}")
