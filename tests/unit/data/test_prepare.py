"""prepare(): the same samples whoever tokenizes them, built once, and again when what counts has changed."""

import csv
import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_accelerate.config.schema import DataSection
from glm_accelerate.config.sources import Source
from glm_accelerate.data.encode import Kept, encode
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.prepare import EncodeSettings, content_key, prepare
from glm_accelerate.data.read import read
from glm_accelerate.data.store import Store
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.runtime.errors import UserError

SETTINGS = EncodeSettings(template="glm4-0414", max_tokens=64)
RANGE_BYTES = 1000
FILES = [*(f"{name}.bin" for name in ("tokens", "offsets", "targets", "places", "contents")), "report.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files are all that is needed of a model."""
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer(["hello", " world"]).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "glm4"}')
    return directory


def talk(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}, ensure_ascii=False)


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [talk(f"问 {i}", "答 " * (i % 20 + 1)) for i in range(200)]
    lines[50] = ""  # a blank line counts as a line and holds nothing
    return write(tmp_path / "data.jsonl", lines)


def run(data: Path, model: Path, cache: Path, settings: EncodeSettings = SETTINGS, **how: Any) -> Store:
    how = {"workers": 1, "range_bytes": RANGE_BYTES, **how}
    return prepare([Source(path=str(data), weight=1.0)], settings, model, cache=cache, **how)


def everything(store: Store) -> list[tuple[list[int], list[bool], str]]:
    samples = [store[number] for number in range(len(store))]
    return [(one.tokens.tolist(), one.targets.tolist(), str(one.place)) for one in samples]


def directories(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if (path / "report.json").exists())


@pytest.mark.parametrize(("workers", "range_bytes"), [(1, 1 << 20), (1, 100), (2, 1000), (3, 4000)])
def test_the_same_as_encoding_the_file_directly(
    data: Path, model: Path, tmp_path: Path, workers: int, range_bytes: int
) -> None:
    store = run(data, model, tmp_path / "cache", workers=workers, range_bytes=range_bytes)
    template, tokenizer = get_template("glm4-0414"), load_tokenizer(model)
    direct = [
        one for one in encode(list(read(data)), template, tokenizer, max_tokens=64) if isinstance(one, Kept)
    ]

    assert len(direct) == 199
    expected = [(one.tokens.tolist(), one.targets.tolist(), str(one.place)) for one in direct]
    assert everything(store) == expected
    assert store.report.truncated == sum(one.truncated for one in direct) > 0
    assert store.report.longest == max(one.cut_from for one in direct) > 64
    assert (
        run(
            data, model, tmp_path / "cache", replace(SETTINGS, max_tokens=store.report.longest)
        ).report.truncated
        == 0
    )
    assert store.report.bytes == data.stat().st_size


def test_built_once(data: Path, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(data, model, cache)
    (directory,) = directories(cache)
    written = (directory / "tokens.bin").stat().st_mtime_ns
    assert run(data, model, cache).fingerprint == first.fingerprint
    assert (directory / "tokens.bin").stat().st_mtime_ns == written


def test_what_counts_makes_another_directory(data: Path, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    changes: list[dict[str, Any]] = [
        {"max_tokens": 65},
        {"train_on": "last"},
        {"labels": "stock"},
        {"overlong": "drop"},
        {"skip_bad": 1},
        {"format": "messages"},
        {"template": "glm4"},
    ]
    prints = {run(data, model, cache, replace(SETTINGS, **change)).fingerprint for change in ({}, *changes)}
    assert len(prints) == len(directories(cache)) == len(changes) + 1

    other = tmp_path / "other"
    shutil.copytree(model, other)
    build_tokenizer(["other"]).save(str(other / "tokenizer.json"))
    assert run(data, other, cache).fingerprint not in prints

    data.write_text(talk("new", "content") + "\n")
    assert run(data, model, cache).fingerprint not in prints


def test_the_same_content_elsewhere_is_not_built_again(data: Path, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(data, model, cache)
    moved = data.rename(tmp_path / "moved.jsonl")
    second = run(moved, model, cache)
    assert second.fingerprint == first.fingerprint
    assert second[0].place.file == str(moved)
    assert second.report.remarks
    assert all(remark.place.file == str(moved) for remark in second.report.remarks)


def test_another_file_leaves_the_first_alone(data: Path, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    alone = run(data, model, cache)
    more = write(tmp_path / "more.jsonl", [talk("more", "yes")])
    sources = [Source(path=str(more), weight=2.0), Source(path=str(data), weight=0.5)]
    both = prepare(sources, SETTINGS, model, cache=cache, workers=1)
    assert [tuple(span) for span in both.spans] == [(0, 1, 2.0), (1, 1 + len(alone), 0.5)]
    assert everything(both)[1:] == everything(alone)
    assert len(directories(cache)) == 2


@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "targets.bin", "places.bin", "contents.bin", "report.json"]
)
@pytest.mark.parametrize("damage", ["cut off", "altered"])
def test_a_broken_cache_is_built_again_and_named(
    data: Path, model: Path, tmp_path: Path, name: str, damage: str
) -> None:
    cache = tmp_path / "cache"
    first = run(data, model, cache)
    good = everything(first)
    assert first.damages == []
    (directory,) = directories(cache)
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[:-5] if damage == "cut off" else content[:-8] + bytes(8))
    again = run(data, model, cache)
    assert everything(again) == good
    (mended,) = again.damages
    assert mended.startswith(f"what was prepared of {data} could not be used and was made anew: ")
    assert name in mended
    assert (directory / name).read_bytes() == content
    assert run(data, model, cache).damages == []


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_else_reads_it_whatever_the_umask(
    data: Path, model: Path, tmp_path: Path, request: pytest.FixtureRequest, shared: bool
) -> None:
    cache = tmp_path / "cache"
    before = os.umask(0)
    request.addfinalizer(lambda: os.umask(before))
    if shared:
        cache.mkdir()
        cache.chmod(0o2770)
    assert len(run(data, model, cache)) == 199
    (directory,) = directories(cache)
    folders = [cache, directory, cache / "locks"]
    files = [*directory.iterdir(), *(cache / "locks").iterdir()]
    assert len(files) == 7
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o770 if shared else 0o700}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o660 if shared else 0o600}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_its_line(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    lines = data.read_text().splitlines()
    lines[120] = '{"messages": oops}'
    lines[190] = '{"messages": oops}'
    write(data, lines)
    with pytest.raises(UserError, match="broken JSON") as caught:
        run(data, model, tmp_path / "cache", workers=workers)
    assert str(caught.value.where).startswith(f"{data}:121")
    assert caught.value.cure == "mend or remove the line, or set data.skip_bad"
    assert not directories(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".building-*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_counted_over_the_whole_file(
    data: Path, model: Path, tmp_path: Path, workers: int
) -> None:
    lines = data.read_text().splitlines()
    for bad in (7, 60, 150):
        lines[bad - 1] = "{"
    write(data, lines)
    with pytest.raises(UserError, match="after 2 bad lines") as caught:
        run(data, model, tmp_path / "cache", replace(SETTINGS, skip_bad=2), workers=workers)
    assert str(caught.value.where).startswith(f"{data}:150")

    store = run(data, model, tmp_path / "cache", replace(SETTINGS, skip_bad=3), workers=workers)
    assert store.report.bad == 3
    assert store.report.samples == 196
    unreadable = [one.place.line for one in store.report.remarks if one.reason.startswith("unreadable")]
    assert unreadable == [7, 60, 150]


@pytest.mark.parametrize("workers", [1, 2])
def test_overlong_is_an_error_where_asked_for(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    lengths = run(data, model, tmp_path / "cache", replace(SETTINGS, max_tokens=1000))
    first = next(lengths[i].place for i in range(len(lengths)) if lengths.lengths[i] > 64)
    with pytest.raises(UserError, match="more than") as caught:
        run(data, model, tmp_path / "cache", replace(SETTINGS, overlong="error"), workers=workers)
    assert caught.value.where == str(first)


def test_what_is_dropped_is_counted_and_named(data: Path, model: Path, tmp_path: Path) -> None:
    whole = run(data, model, tmp_path / "cache", replace(SETTINGS, max_tokens=1000))
    report = run(data, model, tmp_path / "cache", replace(SETTINGS, overlong="drop")).report
    too_long = int(np.sum(whole.lengths > 64))
    assert report.dropped == {"too long": too_long}
    assert report.samples == 199 - too_long
    places = [whole[i].place for i in range(len(whole)) if whole.lengths[i] > 64]
    assert [remark.place for remark in report.remarks] == places[:5]


def test_nothing_to_learn_is_an_error(model: Path, tmp_path: Path) -> None:
    only_asks = json.dumps({"messages": [{"role": "user", "content": "why?"}]})
    data = write(tmp_path / "asks.jsonl", [only_asks] * 3)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match="3 no target") as caught:
            run(data, model, tmp_path / "cache")
        assert caught.value.where == f"{data}:1"

    long = write(tmp_path / "long.jsonl", [talk("why?", "because " * 100)] * 4)
    with pytest.raises(UserError, match="4 too long"):
        run(long, model, tmp_path / "cache", replace(SETTINGS, overlong="drop"))

    blank = write(tmp_path / "blank.jsonl", ["", "", ""])
    for form in ("auto", "messages"):
        with pytest.raises(UserError, match=r"empty|no sample"):
            run(blank, model, tmp_path / "cache", replace(SETTINGS, format=form))


def test_a_file_that_grows_meanwhile_is_not_published(data: Path, model: Path, tmp_path: Path) -> None:
    size = data.stat().st_size

    def append(done: int, total: int) -> None:
        assert done <= total
        if done > size and data.stat().st_size == size:
            with data.open("a") as file:
                file.write(talk("more", "yes") + "\n")

    with pytest.raises(UserError, match="changed while it was read"):
        run(data, model, tmp_path / "cache", progress=append)
    assert not directories(tmp_path / "cache")
    assert len(run(data, model, tmp_path / "cache")) == 200


def test_progress_counts_every_byte(data: Path, model: Path, tmp_path: Path) -> None:
    for _ in range(2):  # built, then opened
        seen: list[tuple[int, int]] = []
        run(
            data,
            model,
            tmp_path / "cache",
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert seen[-1] == (2 * data.stat().st_size,) * 2
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_line_far_larger_than_a_range(model: Path, tmp_path: Path) -> None:
    lines = [talk("a", "b"), talk("long " * 20_000, "c"), talk("d", "e")]
    store = run(write(tmp_path / "data.jsonl", lines), model, tmp_path / "cache", workers=2)
    assert [store[i].place.line for i in range(3)] == [1, 2, 3]
    assert store.lengths[1] <= 64


def test_a_cache_that_cannot_be_is_named(data: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(UserError, match=r"data\.cache") as caught:
        run(data, model, tmp_path / "cache")
    assert caught.value.where == str(tmp_path / "cache")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_line_that_cannot_be_rendered_is_a_bad_line(
    data: Path, model: Path, tmp_path: Path, workers: int
) -> None:
    lines = data.read_text().splitlines()
    strange = json.loads(lines[29]) | {"tools": [{"type": "retrieval"}]}
    lines[29] = lines[99] = json.dumps(strange)
    lines[59] = "{"
    write(data, lines)
    with pytest.raises(UserError, match="a tool of type 'retrieval' cannot be written") as caught:
        run(data, model, tmp_path / "cache", workers=workers, range_bytes=1 << 14)
    assert caught.value.where == f"{data}:30"  # in file order, though line 60 is met while reading
    with pytest.raises(UserError, match="after 2 bad lines") as caught:
        run(data, model, tmp_path / "cache", replace(SETTINGS, skip_bad=2), workers=workers)
    assert caught.value.where == f"{data}:100"

    store = run(data, model, tmp_path / "cache", replace(SETTINGS, skip_bad=3), workers=workers)
    assert store.report.bad == 3
    assert store.report.samples == 196
    assert [remark.place.line for remark in store.report.remarks if "retrieval" in remark.reason] == [30, 100]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_that_does_not_say_its_template_is_prepared_with_the_one_that_is_said(
    data: Path, sentence_dir: Path, tmp_path: Path, workers: int
) -> None:
    (sentence_dir / "config.json").write_text(json.dumps({"model_type": "chatglm"}))
    section = DataSection.model_validate({
        "train": str(data), "max_tokens": 64, "cache": str(tmp_path / "cache")
    })  # fmt: skip
    for name in ("chatglm2", "chatglm3"):
        settings = replace(SETTINGS, template=name)
        assert len(run(data, sentence_dir, tmp_path / "cache", settings, workers=workers)) == 199
        assert len(open_inputs(section.model_copy(update={"template": name}), sentence_dir).train) == 199
    with pytest.raises(UserError, match=r"set data\.template to chatglm2, chatglm3"):
        open_inputs(section, sentence_dir)


def test_a_tilde_is_the_home(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(data.parent))
    store = run(Path("~") / data.name, model, tmp_path / "cache")
    assert store[0].place.file == str(data)


def test_a_leftover_that_cannot_be_removed_is_no_error(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shared cache that may only be read."""
    cache = tmp_path / "cache"
    run(data, model, cache)
    (cache / ".building-key-1234").mkdir()

    def forbidden(cache: Path, key: str) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(cache / "locks" / key))

    monkeypatch.setattr("glm_accelerate.data.prepare._lock_of", forbidden)
    assert len(run(data, model, cache)) == 199


def test_what_is_excluded_is_not_learnt(model: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "first", "weight": 0},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "second"},
    ]
    data = write(tmp_path / "data.jsonl", [json.dumps({"messages": turns})])
    sample = run(data, model, tmp_path / "cache")[0]
    learnt = load_tokenizer(model).decode(sample.tokens[sample.targets].tolist(), skip_special=False)
    assert learnt == "\nsecond<|user|>"


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("glm4-0414", "99facc8a2e4c46018690a7bff7222c55dd2df53c"),
        ("chatglm3", "eb1b4f460561c09d186546f3322fdc818ca6f4e5"),
    ],
)
def test_data_of_an_earlier_version_stay_the_same_data(template: str, key: str) -> None:
    """A run that began before an upgrade goes on after it, unless its template writes another text."""
    assert content_key("d", EncodeSettings(template=template), "t") == key


def test_files_of_another_version_are_made_anew(data: Path, model: Path, tmp_path: Path) -> None:
    before = run(data, model, tmp_path / "cache")
    (directory,) = directories(tmp_path / "cache")
    report = json.loads((directory / "report.json").read_text())
    (directory / "report.json").write_text(json.dumps(report | {"version": report["version"] - 1}))
    after = run(data, model, tmp_path / "cache")
    assert after.fingerprint == before.fingerprint
    assert everything(after) == everything(before)
    assert ["another format version" in part.damage for part in after.parts] == [True]


def rows_of(source: Source, model: Path, cache: Path) -> list[tuple[list[int], list[bool], str]]:
    return everything(prepare([source], SETTINGS, model, cache=cache, workers=2, range_bytes=200))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_columns_and_speakers_of_other_names_give_the_same_samples(
    model: Path, tmp_path: Path, ending: str
) -> None:
    turns = [[{"who": "me", "says": f"问 {i}"}, {"who": "it", "says": f"答 {i}"}] for i in range(30)]
    rows = [{"talk": each, "messages": "not this"} for each in turns]
    path = tmp_path / f"other.{ending}"
    if ending == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["messages", "talk"])
            table.writerows([row["messages"], json.dumps(row["talk"])] for row in rows)
    elif ending == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        write(path, [json.dumps(row) for row in rows])
    tags = {"from": "who", "value": "says", "human": "me", "gpt": "it"}
    source = Source(path=str(path), columns={"conversations": "talk"}, tags=tags)  # pyright: ignore[reportArgumentType]
    found = rows_of(source, model, tmp_path / "cache")
    plain = write(tmp_path / "plain.jsonl", [talk(f"问 {i}", f"答 {i}") for i in range(30)])
    expected = rows_of(Source(path=str(plain)), model, tmp_path / "cache")
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert len(found) == 30


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_only_the_first_rows_are_read(data: Path, model: Path, tmp_path: Path, ending: str) -> None:
    """The same samples as of all rows, with their places, and a cache of their own."""
    if ending == "json":
        lines = [json.loads(line) for line in data.read_text("utf-8").splitlines() if line]
        data.with_suffix(".json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
        data = data.with_suffix(".json")
    whole = rows_of(Source(path=str(data)), model, tmp_path / "cache")
    for first in (1, 70, 5000):
        found = rows_of(Source(path=str(data), first=first), model, tmp_path / "cache")
        assert found == whole[:first]
    assert rows_of(Source(path=str(data)), model, tmp_path / "cache") == whole
