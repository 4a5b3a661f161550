"""Scanning: cuts fall between lines and know their line numbers; only a changed file is read again."""

import hashlib
import os
from pathlib import Path

import pytest

from glm_accelerate.data.scan import Range, Scan, scan
from glm_accelerate.runtime import digests
from glm_accelerate.runtime.errors import UserError


class Read:
    """Counts what the scanner says that it read."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, count: int) -> None:
        self.bytes += count


def scanned(path: Path, range_bytes: int) -> Scan:
    read = Read()
    found = scan(path, read, range_bytes)
    assert read.bytes == path.stat().st_size
    return found


CONTENTS = {
    "ordinary": b"".join(b'{"text": "%d"}\n' % i * (i % 5 + 1) for i in range(50)),
    "no newline at the end": b"one\ntwo\nthree",
    "one long line": b"x" * 1000 + b"\nshort\n",
    "nothing but newlines": b"\n" * 100,
    "carriage returns": b"a\r\nb\r\nc\rd\n" * 20,
    "one byte": b"x",
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("range_bytes", [1, 7, 64, 10_000])
def test_ranges_tile_the_file_between_lines(tmp_path: Path, name: str, range_bytes: int) -> None:
    path = tmp_path / "data.jsonl"
    content = CONTENTS[name]
    path.write_bytes(content)
    found = scanned(path, range_bytes)

    assert b"".join(content[part.start : part.stop] for part in found.ranges) == content
    for part in found.ranges:
        assert part.line == 1 + content[: part.start].count(b"\n")
        assert part.start == 0 or content[part.start - 1 : part.start] == b"\n"
    assert found.digest == hashlib.sha256(content).hexdigest()


def test_a_result_that_cannot_be_remembered_is_no_error(tmp_path: Path, entries: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"a\nb\n")
    entries.parent.mkdir()
    entries.write_text("a file, not a directory")
    assert scanned(path, 10).ranges == (Range(0, 4, 1),)


def test_a_pipe_is_not_called_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe: is not a regular file \(write it to a file"):
        scan(tmp_path / "pipe", Read())


def test_a_line_longer_than_a_range_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"a\n" + b"x" * 100 + b"\nb\n")
    assert scanned(path, 10).ranges == (Range(0, 2, 1), Range(2, 105, 2))


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are remembered, those of a file changed just now, too."""
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "FRESH_NS", -(10**30))
    return tmp_path / "cache" / "digests"


def test_a_settled_file_is_read_once(tmp_path: Path, entries: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\n")
    first = scanned(path, 64)
    (entry,) = entries.iterdir()
    entry.write_text(entry.read_text().replace(first.digest, "remembered"))
    assert scanned(path, 64).digest == "remembered"

    path.write_bytes(b"two\n")
    assert scanned(path, 64).digest == hashlib.sha256(b"two\n").hexdigest()
    assert len(list(entries.iterdir())) == 1, "one entry a path, not one a version"


def test_a_change_that_sets_the_time_back_is_seen(tmp_path: Path, entries: Path) -> None:
    """As `cp -p` and `rsync -t --inplace` do: the same size, time and inode."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\n")
    scanned(path, 64)
    before = path.stat()
    path.write_bytes(b"two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scanned(path, 64).digest == hashlib.sha256(b"two\n").hexdigest()


def test_a_file_changed_just_now_is_not_remembered(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "FRESH_NS", 10**12)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\n")
    scanned(path, 64)
    assert not entries.exists() or not list(entries.iterdir())


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"identity": 3}'])
def test_damaged_memory_is_ignored(tmp_path: Path, entries: Path, damage: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\n")
    first = scanned(path, 64)
    (entry,) = entries.iterdir()
    entry.write_bytes(damage)
    assert scanned(path, 64) == first


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\n" * 100)

    def append(_: int) -> None:
        if path.stat().st_size == 400:
            with path.open("ab") as file:
                file.write(b"more\n")

    with pytest.raises(UserError, match="changed"):
        scan(path, append, 64)


def test_what_is_no_data_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, words in ((empty, "empty"), (tmp_path, "directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(UserError, match=words) as caught:
            scan(path, lambda _: None)
        assert caught.value.where == str(path)
        assert caught.value.cure


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_file_that_may_not_be_read_is_named_itself(tmp_path: Path) -> None:
    file = tmp_path / "secret.jsonl"
    file.write_text("{}\n")
    file.chmod(0)
    with pytest.raises(UserError, match=r"secret\.jsonl: cannot read the data file: Permission denied"):
        scan(file, lambda count: None)
