"""Where samples come from: files, and what a share or a number to hold out of them is."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Column = Literal[
    "messages", "conversations", "instruction", "input", "output", "history", "system", "tools", "text"
]
Tag = Literal["from", "value", "human", "gpt", "system", "observation", "function_call"]


class Source(BaseModel):
    """One data file and how often its samples are drawn in an epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    path: str
    """JSON lines, a JSON array, CSV, Parquet or Arrow, packed or not; or a pattern of such names."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """2 draws each sample twice an epoch, 0.5 draws half of them, another half each epoch; at most 1000."""
    first: int | None = Field(default=None, ge=1)
    """Only so many of its first rows, to try something with a part."""
    columns: dict[Column, str] = {}
    """What its columns are called, by the names that they have here; then no others are read."""
    tags: dict[Tag, str] = {}
    """What it calls speakers and keys of turns, by the names that they have in `conversations` here."""


def _as_sources(value: object) -> object:
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


def _as_held_out(value: object) -> object:
    """A share as a number below 1, a number of samples, or files."""
    number = value
    if isinstance(value, str) and (percent := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", value)):
        number = float(percent[1]) / 100
    if not isinstance(number, int | float):
        return value if value is None else _as_sources(value)
    if 0 < number < 1:
        return float(number)
    if isinstance(value, str | bool) or number < 1 or number != int(number):
        raise ValueError(f"{value}, expected a share as 2%, a whole number of samples, or files")
    return int(number)


HeldOut = Annotated[list[Source] | int | float, BeforeValidator(_as_held_out)]
