"""What runs below a process. Its threads may end while they are looked through."""

from contextlib import suppress
from pathlib import Path


def children_of(process: int) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, listed.read_text().split())
    return found
