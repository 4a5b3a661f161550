"""Digests are remembered, and never believed of a file that was touched."""

import os
import shutil
from pathlib import Path

import pytest

from glm_accelerate.runtime import digests
from glm_accelerate.runtime.digests import file_digest


def test_digests_are_remembered_until_the_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "cache"))
    file, entries = tmp_path / "weights", tmp_path / "cache" / "digests"
    file.write_bytes(b"one")
    first = file_digest(file)
    assert not list(entries.iterdir())  # too fresh to be trusted
    monkeypatch.setattr(digests, "FRESH_NS", -(10**30))
    assert file_digest(file) == first
    (entry,) = entries.iterdir()
    entry.write_text(entry.read_text().replace(first, "a" * 64))
    assert file_digest(file) == "a" * 64  # it is the memory that answers
    entry.write_bytes(b"\xff rubbish")
    assert file_digest(file) == first
    file.write_bytes(b"two")
    assert file_digest(file) != first


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_another_file_of_equal_size_and_time_is_read(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `cp -p` and `rsync -t` leave."""
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "FRESH_NS", -(10**30))
    file, other = tmp_path / "weights", tmp_path / "other"
    file.write_bytes(b"one")
    first, time = file_digest(file), file.stat().st_mtime_ns
    other.write_bytes(b"two")
    os.utime(other, ns=(time, time))
    if how == "in place":
        shutil.copy2(other, file)
    else:
        other.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (3, time)
    assert file_digest(file) != first
