"""What tells two tokenizers apart: a digest of the files that decide their numbers."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def fingerprint_of(paths: Iterable[Path]) -> str:
    """SHA-256 of names and contents of those that are there."""
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
