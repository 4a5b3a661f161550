"""The name of the newest checkpoint, and what interrupted saves leave behind."""

import shutil
from pathlib import Path

LATEST = "latest"


def sweep(directory: Path) -> None:
    """Remove what interrupted saves left. For the first rank, at the start, with the run's lock."""
    kinds = (".checkpoint-*", "..checkpoint-*", ".snapshot-*", "..snapshot-*")
    for pattern in (*kinds, f".{LATEST}.*"):
        for leftover in directory.glob(pattern):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
