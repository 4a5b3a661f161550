"""Whether numbers are finite, seen from their bytes: the writer process has no torch."""

import math

import numpy as np

EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones: infinite, or not a number
FLOATS = {"F32": np.float32, "F64": np.float64}


def all_finite(payload: memoryview | bytes, dtype: str) -> bool:
    """True for numbers of a kind that is always finite, too."""
    if not len(payload):
        return True
    if dtype in FLOATS:
        numbers = np.frombuffer(payload, FLOATS[dtype])
        with np.errstate(invalid="ignore"):
            return math.isfinite(numbers.min()) and math.isfinite(numbers.max())
    if dtype in EXPONENTS:
        mask = np.uint16(EXPONENTS[dtype])
        return bool((np.frombuffer(payload, np.uint16) & mask).max() != mask)
    return True
