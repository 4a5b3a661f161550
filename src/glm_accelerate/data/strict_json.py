"""JSON without what readers disagree on: no key twice, no NaN, no infinity, no half of a surrogate pair.

Lines of a data file and the JSON texts inside them (tools, calls) are read alike.
"""

import json
import math
from reprlib import repr as shortly
from typing import Any, NoReturn

from glm_accelerate.runtime.errors import UserError


def parse(text: str) -> Any:
    """JSONDecodeError for what is not JSON; UserError, without a place, for what could be misread."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        if "\\ud" in text or "\\uD" in text:
            _check_surrogates(value)
    except RecursionError as error:
        raise UserError("JSON nested too deeply", cure="remove the line") from error
    except (json.JSONDecodeError, UserError):
        raise
    except ValueError as error:  # Python refuses to convert thousands of digits
        raise UserError("a number of thousands of digits", cure="write it in quotes") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"the key {shortly(twice)} stands twice in one object", cure="keep one of them")
    return unique


def _no_constant(name: str) -> NoReturn:
    raise UserError(f"{name} is not JSON", cure='write null, a number or a string such as "NaN"')


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise UserError(f"the number {shortly(text)} is too large to be kept", cure="write it in quotes")
    return number


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"half of a surrogate pair ({half}), which is no character",
            cure="write the whole pair, or the character itself in UTF-8",
        ) from error
