"""The store's format: what goes in comes out, and damage is seen when it is opened."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from glm_accelerate.data.store import BrokenStore, EncodedBlock, Remark, SourceSpan, Store, Writer, open_part
from glm_accelerate.data.types import FilePlace

SOURCE = Path("talk.jsonl")
FILES = [*(f"{name}.bin" for name in ("tokens", "offsets", "targets", "places", "contents")), "report.json"]


def block(samples: Sequence[Sequence[int]], lines: Sequence[int], **rest: object) -> EncodedBlock:
    """Samples written as they are stored: a learnt token t as ~t."""
    said = {"truncated": 0, "longest": 0, "dropped": {}, "bad": 0, "remarks": (), **rest}
    flat = np.array([token for sample in samples for token in sample], np.int32)
    lengths = np.array([len(sample) for sample in samples], np.int32)
    targets = np.array([sum(token < 0 for token in sample) for sample in samples], np.int32)
    return EncodedBlock(flat, lengths, targets, np.array(lines, np.int32), np.array(lines, np.uint64), **said)  # pyright: ignore[reportArgumentType]


def write(cache: Path, name: str, *blocks: EncodedBlock) -> Path:
    temporary = cache / f".building-{name}"
    temporary.mkdir(parents=True)
    with Writer(temporary) as writer:
        for one in blocks:
            writer.append(one)
        writer.publish(cache / name, source_bytes=100)
    return cache / name


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    first = block([[5, ~6, ~7], [8, ~0]], [1, 3])
    directory = write(tmp_path, "key", first, block([], []), block([[~9]], [40]))
    store = Store((open_part(directory, SOURCE, 1.0),))

    assert len(store) == 3
    assert store.lengths.tolist() == [3, 2, 1]
    assert store.targets.tolist() == [2, 1, 1]
    assert [store[i].tokens.tolist() for i in range(3)] == [[5, 6, 7], [8, 0], [9]]
    assert [store[i].targets.tolist() for i in range(3)] == [[False, True, True], [False, True], [True]]
    assert [store[i].place for i in range(3)] == [FilePlace("talk.jsonl", line) for line in (1, 3, 40)]
    assert store[0].tokens.dtype == np.int32


def test_several_sources_are_numbered_through(tmp_path: Path) -> None:
    one = open_part(write(tmp_path, "one", block([[1], [2]], [1, 2])), Path("one.jsonl"), 2.0)
    two = open_part(write(tmp_path, "two", block([[~3]], [9])), Path("two.jsonl"), 0.5)
    store = Store((one, two))

    assert store.spans == (SourceSpan(0, 2, 2.0), SourceSpan(2, 3, 0.5))
    assert store[2].place == FilePlace("two.jsonl", 9)
    assert store.lengths.tolist() == [1, 1, 1]
    assert store.fingerprint == Store((one, two)).fingerprint
    assert store.fingerprint != Store((two, one)).fingerprint, (
        "the order decides which sample has which number"
    )
    with pytest.raises(IndexError):
        store[3]
    with pytest.raises(IndexError):
        store[-1]


def test_report_adds_up_and_names_the_first_few_lines(tmp_path: Path) -> None:
    def left(line: int, reason: str) -> Remark:
        return Remark(FilePlace("talk.jsonl", line), reason)

    many = tuple(left(line, "too long") for line in range(1, 5))
    blocks = [
        block([[1, ~2]], [5], truncated=1, dropped={"too long": 4}, remarks=many),
        block(
            [], [], dropped={"too long": 4, "no target": 1}, bad=1, remarks=(*many, left(90, "unreadable: x"))
        ),
    ]
    part = open_part(write(tmp_path, "one", *blocks), SOURCE, 1.0)
    report = Store((part, part)).report

    assert (report.samples, report.tokens, report.targets) == (2, 4, 2)
    assert (report.truncated, report.bad, report.bytes) == (2, 2, 200)
    assert report.dropped == {"too long": 16, "no target": 2}
    kept = part.report.remarks
    assert [remark.reason for remark in kept] == ["too long"] * 5 + ["unreadable: x"]
    assert kept[-1].place == FilePlace("talk.jsonl", 90)


def test_a_source_without_samples_opens(tmp_path: Path) -> None:
    empty = open_part(write(tmp_path, "empty", block([], [])), Path("empty.jsonl"), 1.0)
    full = open_part(write(tmp_path, "full", block([[1]], [1])), SOURCE, 1.0)
    store = Store((empty, full))
    assert len(store) == 1
    assert store[0].place == FilePlace("talk.jsonl", 1)


@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "targets.bin", "places.bin", "contents.bin", "report.json"]
)
@pytest.mark.parametrize("damage", ["shorter", "longer", "gone", "empty", "one bit"])
def test_damage_is_seen(tmp_path: Path, name: str, damage: str) -> None:
    directory = write(tmp_path, "key", block([[1, 2], [3]], [1, 2]))
    file = directory / name
    content = file.read_bytes()
    match damage:
        case "shorter":
            file.write_bytes(content[:-3])
        case "longer":
            file.write_bytes(content + b"\0\0\0\0")
        case "one bit":
            file.write_bytes(bytes([*content[:-4], content[-4] ^ 4, *content[-3:]]))
        case "empty":
            file.write_bytes(b"")
        case _:
            file.unlink()
    with pytest.raises(BrokenStore, match=str(directory)):
        open_part(directory, SOURCE, 1.0)


def test_another_format_version_is_not_read(tmp_path: Path) -> None:
    directory = write(tmp_path, "key", block([[1]], [1]))
    report = json.loads((directory / "report.json").read_text())
    (directory / "report.json").write_text(json.dumps({**report, "version": 0}))
    with pytest.raises(BrokenStore, match="version"):
        open_part(directory, SOURCE, 1.0)


def test_altered_offsets_are_seen(tmp_path: Path) -> None:
    directory = write(tmp_path, "key", block([[1, 2], [3]], [1, 2]))
    np.array([0, 1, 3], np.int64).tofile(directory / "offsets.bin")
    with pytest.raises(BrokenStore, match=r"offsets\.bin is not what was written"):
        open_part(directory, SOURCE, 1.0)


def test_what_another_rank_has_checked_is_not_read_once_more(tmp_path: Path) -> None:
    directory = write(tmp_path, "key", block([[1, 2], [3]], [1, 2]))
    np.array([1, 2, 4], np.int32).tofile(directory / "tokens.bin")
    assert open_part(directory, SOURCE, 1.0, check=False).tokens.tolist() == [1, 2, 4]


def test_the_first_to_publish_stands(tmp_path: Path) -> None:
    directory = write(tmp_path, "key", block([[1]], [1]))
    late = tmp_path / ".building-late"
    late.mkdir()
    with Writer(late) as writer:
        writer.append(block([[2, 3]], [1]))
        writer.publish(directory, source_bytes=100)
    assert Store((open_part(directory, SOURCE, 1.0),))[0].tokens.tolist() == [1]


def test_arrays_are_views_that_nobody_can_write(tmp_path: Path) -> None:
    part = open_part(write(tmp_path, "key", block([[1, 2]], [1])), SOURCE, 1.0)
    assert part.tokens.base is not None
    with pytest.raises(ValueError, match="read-only"):
        part.tokens[0] = 7
