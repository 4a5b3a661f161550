"""Memory and time as people write and read them. What is written here is binary (GiB) everywhere."""

import re

MEMORY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
SCALES = {unit.lower(): scale for unit, scale in (MEMORY | DECIMAL).items()}
WRITTEN = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(SCALES)})", re.ASCII | re.IGNORECASE)
RATE = re.compile(r"(\d+(?:\.\d+)?) ?([mgt])bit(?:/s)?", re.ASCII | re.IGNORECASE)
BITS = {"m": 1e6, "g": 1e9, "t": 1e12}
TIME = (("days", 86_400.0, 172_800.0), ("h", 3_600.0, 7_200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0))


def amount(size: float) -> str:
    """Bytes in the largest binary unit that they fill."""
    for unit, scale in MEMORY.items():
        if abs(size) >= scale:
            return number(size / scale, unit)
    return number(size, "B")


def read_amount(text: str) -> int | None:
    """Bytes of `12GiB` (binary), `12GB` (decimal) or the like; None if it is no amount."""
    match = WRITTEN.fullmatch(text.strip())
    return round(float(match[1]) * SCALES[match[2].lower()]) if match else None


def read_rate(text: str) -> float | None:
    """Bytes a second of `100Gbit`, as networks are sold; None if it is no rate."""
    match = RATE.fullmatch(text.strip())
    return float(match[1]) * BITS[match[2].lower()] / 8 if match else None


def duration(seconds: float) -> str:
    """Seconds in the unit in which people would say them."""
    for unit, scale, least in TIME:
        if seconds >= least:
            return number(seconds / scale, unit)
    return number(seconds * 1e3, "ms") if seconds >= 1e-3 else number(seconds * 1e6, "µs")


def number(value: float, unit: str = "") -> str:
    """Three digits or more, with the unit behind."""
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}" if unit else shown
