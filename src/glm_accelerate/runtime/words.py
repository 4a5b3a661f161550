"""Memory and time as people read them: one unit for memory everywhere (binary), one way to say how long."""

MEMORY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
TIME = (("days", 86_400.0, 172_800.0), ("h", 3_600.0, 7_200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0))


def amount(size: float) -> str:
    """Bytes in the binary unit that suits them."""
    for unit, scale in MEMORY:
        if abs(size) >= scale:
            return number(size / scale, unit)
    return number(size, "B")


def duration(seconds: float) -> str:
    """In the unit in which people would say it."""
    for unit, scale, least in TIME:
        if seconds >= least:
            return number(seconds / scale, unit)
    return number(seconds * 1e3, "ms") if seconds >= 1e-3 else number(seconds * 1e6, "µs")


def number(value: float, unit: str = "") -> str:
    """Three digits or more, with the unit behind."""
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}" if unit else shown
