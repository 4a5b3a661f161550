"""Amounts of memory as people write them: 12GiB (binary), 12GB (decimal), 512MiB."""

import re

from pydantic_core import PydanticCustomError

UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
WRITTEN = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", re.ASCII | re.IGNORECASE)
CAPITALS = {unit.lower(): scale for unit, scale in UNITS.items()}


def read_amount(text: str) -> int | None:
    """Bytes, or None if it is no amount."""
    found = WRITTEN.fullmatch(text.strip())
    return round(float(found[1]) * CAPITALS[found[2].lower()]) if found else None


def as_said(text: object) -> str:
    """The same text, if it is an amount above nothing: a config is kept as it was said."""
    if not isinstance(text, str) or not read_amount(text):
        raise PydanticCustomError("amount", "an amount such as 12GiB")
    return text
