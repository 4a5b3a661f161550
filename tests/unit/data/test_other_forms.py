"""Files of other forms: the same samples as JSON lines, errors where a person finds them, nothing kept."""

import bz2
import csv
import fcntl
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
import zstandard

from glm_accelerate.config.schema import DataSection
from glm_accelerate.data import other_forms
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.read import read
from glm_accelerate.data.store import Store
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.runtime.errors import UserError

ROWS: list[dict[str, Any]] = [
    {
        "instruction": f'ask "{number}", 你好',
        "input": "a\nb" * (number % 2),
        "output": f"say\n\n{number}, [x] {{",
    }
    for number in range(40)
]
TALKS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": "yes"}],
        "tools": [
            {
                "name": "f",
                "parameters": {"type": "object", "properties": {f"p{number % 2}": {"type": "string"}}},
            }
        ],
    }
    for number in range(6)
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_csv(path: Path, rows: list[dict[str, Any]], mark: str = ",") -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # as Excel writes it
        writer = csv.DictWriter(file, list(rows[0]), delimiter=mark)
        writer.writeheader()
        writer.writerows(rows)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def zstd(content: bytes) -> bytes:
    pack = zstandard.ZstdCompressor().compress
    return pack(content[:1000]) + pack(content[1000:])  # two frames are one file


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "b.json": lambda path, rows: path.write_text(
        "\n " + json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    ),
    "c.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "d.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "e.jsonl.zst": lambda path, rows: path.write_bytes(zstd(lines(rows))),
    "f.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(lines(rows))),
    "g.jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(lines(rows))),
    "h.csv": write_csv,
    "i.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "j.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7),
    "k.feather": lambda path, rows: feather.write_feather(pa.Table.from_pylist(rows), path),
    "l.arrow": write_stream,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer(["hello", " world"]).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "glm4"}')
    return directory


def opened(path: Path, model: Path, **more: Any) -> Store:
    said = {"train": str(path), "cache": str(path.parent / "cache"), "workers": 1, **more}
    return open_inputs(DataSection.model_validate(said), model).train


def samples(store: Store) -> list[list[int]]:
    return [store[number].tokens.tolist() for number in range(len(store))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_gives_the_same_samples(
    name: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_forms, "_PORTION", 50)  # every string, element and line is cut somewhere
    (tmp_path / "plain.jsonl").write_bytes(lines(ROWS))
    WRITERS[name](tmp_path / name, ROWS)
    plain, other = opened(tmp_path / "plain.jsonl", model), opened(tmp_path / name, model, workers=2)
    assert samples(other) == samples(plain)
    assert other[7].place.file == str(tmp_path / name)
    assert not [left.name for left in (tmp_path / "cache").iterdir() if left.name.startswith(".")]
    assert opened(tmp_path / name, model).fingerprint == other.fingerprint
    again = [one.messages for one in read(tmp_path / name)]
    assert again == [one.messages for one in read(tmp_path / "plain.jsonl")]


@pytest.mark.parametrize("name", ["a.json", "h.csv", "j.parquet", "l.arrow"])
def test_conversations_and_tools_come_through(name: str, tmp_path: Path, model: Path) -> None:
    """As JSON text in columns of a CSV; a table gives each tool the properties of all others, as null."""
    written = [{key: json.dumps(value) for key, value in row.items()} for row in TALKS]
    WRITERS[name](tmp_path / name, written if name == "h.csv" else TALKS)
    (tmp_path / "plain.jsonl").write_bytes(lines(TALKS))
    expected = [one.messages for one in read(tmp_path / "plain.jsonl")]
    assert [one.messages for one in read(tmp_path / name)] == expected
    assert samples(opened(tmp_path / name, model)) == samples(opened(tmp_path / "plain.jsonl", model))


def test_the_line_of_a_row_is_the_one_it_begins_in(tmp_path: Path, model: Path) -> None:
    for name, write in WRITERS.items():
        path = tmp_path / name
        write(path, ROWS)
        store = opened(path, model)
        text = path.read_text(encoding="utf-8") if name in ("b.json", "h.csv") else ""
        for number in (0, 1, 20, 39):
            line = store[number].place.line
            if text:
                found = text.split("\n")[line - 1 :]
                assert f"{number}" in found[0] if name == "h.csv" else f"{number}" in found[1]
            else:
                assert line > number


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", '[\n{"text": "a"},\n{"text": oops}\n]', r"x\.json:3:10: broken JSON"),
        (
            "x.json",
            '[\n{"text": "a"},\n{"text": "b", "text": "c"}]',
            r"x\.json:3: the key 'text' stands twice",
        ),
        ("x.json", '[{"text": "a"}\n,\n]', r"x\.json:\d: nothing beside a comma"),
        ("x.json", '[{"text": "a"}', "the array does not end"),
        ("x.json", '[{"text": "a}]', "the array does not end"),
        ("x.json", '[{"text": "a"}]\n[{"text": "b"}]', "something follows the array"),
        ("x.json", "[]", "the data file is empty"),
        ("x.csv", "text\n", "the data file is empty"),
        ("x.csv", "question,answer\na,b\n", r"x\.csv:2: cannot tell the form.*'question', 'answer'"),
        ("x.csv", 'prompt,response\na,"b\nc"\nd\n', r"x\.csv:4: 1 cells, where the first line names 2"),
        ("x.csv", "prompt,response\na,b\nd,\n", r"x\.csv:3: the field 'response' is missing"),
        ("x.csv", 'prompt,response\na,"b\nc\n', r"x\.csv:2: broken CSV"),
        ("x.csv", "prompt,prompt\na,b\n", "columns without a name of their own"),
        ("x.csv", 'messages,x\n"[{",b\n', r"x\.csv:2: messages is not a list"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    name: str, content: str, said: str, tmp_path: Path, model: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        opened(tmp_path / name, model)
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_csv_of_another_encoding_is_told(tmp_path: Path, model: Path) -> None:
    (tmp_path / "x.csv").write_bytes("prompt,response\na,b\n你好,是\n".encode("gbk"))
    with pytest.raises(UserError, match=r"x\.csv:3: is not UTF-8 but likely GBK.*iconv -f GB18030"):
        opened(tmp_path / "x.csv", model)


@pytest.mark.parametrize(
    "name", ["d.jsonl.gz", "e.jsonl.zst", "f.jsonl.bz2", "g.jsonl.xz", "j.parquet", "k.feather"]
)
def test_a_file_that_is_cut_off_is_never_taken_for_a_whole_one(
    name: str, tmp_path: Path, model: Path
) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(UserError, match=f"{name}: cannot be read as"):
        opened(tmp_path / name, model)


def test_bad_rows_are_skipped_as_bad_lines_are(tmp_path: Path, model: Path) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"},\n{"text": 7},\n{"text": "b"}]')
    store = opened(tmp_path / "x.json", model, skip_bad=1)
    assert [store[number].place.line for number in range(2)] == [1, 3]
    assert str(store.report.remarks[0].place) == f"{tmp_path / 'x.json'}:2"


def test_a_missing_package_is_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package, extra in (
        ("j.parquet", "pyarrow.ipc", "parquet"),
        ("e.jsonl.zst", "zstandard", "zstd"),
    ):
        WRITERS[name](tmp_path / name, ROWS)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"is not installed.*pip install \"glm-accelerate\[{extra}\]\""):
            opened(tmp_path / name, model)


def test_a_pattern_stands_for_its_files(tmp_path: Path, model: Path) -> None:
    WRITERS["a.json"](tmp_path / "2.json", ROWS[:3])
    WRITERS["h.csv"](tmp_path / "1.csv", ROWS[3:5])
    both = opened(tmp_path / "[12].*", model)
    assert [part.path.name for part in both.parts] == ["1.csv", "2.json"]
    assert len(both) == 5
    with pytest.raises(UserError, match="no file has a name like this"):
        opened(tmp_path / "*.arrow", model)


def test_it_never_holds_more_than_a_portion(tmp_path: Path) -> None:
    """A file of one portion after the other: what is read ahead of the rows taken is bounded."""
    path = tmp_path / "long.json"
    path.write_text("[" + ",\n".join(['{"text": "%s"}' % ("x" * 1000)] * 5000) + "]")
    seen: list[int] = []
    rows = other_forms.rows_of(path, "array", seen.append)
    for _ in range(10):
        next(rows)
    assert 0 < sum(seen) <= 1 << 20 < path.stat().st_size


def test_what_a_killed_start_left_is_swept_and_what_a_living_one_uses_is_not(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "cache").mkdir()
    dead, alive = tmp_path / "cache/.lines-dead", tmp_path / "cache/.lines-alive"
    dead.touch()
    WRITERS["h.csv"](tmp_path / "h.csv", ROWS)
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opened(tmp_path / "h.csv", model)
        assert (dead.exists(), alive.exists()) == (False, True)
