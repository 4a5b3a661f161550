"""What must stay stays, in whatever order losses come, and a deletion that fails harms nothing."""

import itertools
import math
import os
import random
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import FOLDER, STATE, Manifest
from glm_accelerate.checkpoint.retain import HOUR, Entry, abandon_after, choose_stale, delete, present
from tests.checkpoints import keeping, tidy, write_manifest

NOW = 1e9


def make(run: Path, step: int, owner: str = "mine", **facts: object) -> Path:
    path = run / FOLDER / f"checkpoint-{step}"
    path.mkdir(parents=True)
    write_manifest(path, Manifest(step, 1, {}, {}, facts, run=owner))
    return path


def steps(entries: list[Entry]) -> list[int]:
    return [entry.step for entry in entries]


def entries_of(losses: dict[int, float | None]) -> list[Entry]:
    return [Entry(step, NOW - 10_000 + step, loss) for step, loss in losses.items()]


def test_the_last_and_the_best() -> None:
    entries = entries_of({100: 3.0, 200: 1.0, 300: 2.0, 400: 5.0, 500: 4.0})
    assert steps(choose_stale(entries, keeping(2, 1), NOW)) == [100, 300]
    assert steps(choose_stale(entries, keeping(3, 0), NOW)) == [100, 200]
    assert steps(choose_stale(entries, keeping(1, 2), NOW)) == [100, 400]
    tied = entries_of({1: 2.0, 2: 1.0, 3: 1.0, 4: 9.0})
    assert steps(choose_stale(tied, keeping(1, 1), NOW)) == [1, 3]
    assert steps(choose_stale(entries_of({9000: None, 10000: None, 11000: None}), keeping(1, 1), NOW)) == [
        9000,
        10000,
    ]


def test_the_best_that_was_decided_stays_before_lower_figures() -> None:
    """A later step that is as good as equal takes no place, however its figure looks."""
    entries = entries_of({100: 2.0, 200: 1.999, 300: 2.5, 400: None})
    decided = [replace(entry, best=entry.step == 100) for entry in entries]
    assert steps(choose_stale(entries, keeping(1, 1), NOW)) == [100, 300]
    assert steps(choose_stale(decided, keeping(1, 1), NOW)) == [200, 300]
    assert steps(choose_stale(decided, keeping(1, 2), NOW)) == [300]
    assert steps(choose_stale(decided, keeping(1, 0), NOW)) == [100, 200, 300]


def test_regular_ones() -> None:
    entries = entries_of(dict.fromkeys(range(100, 1100, 100)))
    assert steps(choose_stale(entries, keeping(1, 0, every_steps=300), NOW)) == [100, 200, 400, 500, 700, 800]
    hourly = [Entry(number, NOW + number * HOUR / 2) for number in range(9)]
    assert steps(choose_stale(hourly, keeping(1, 0, every_hours=1.5), NOW)) == [1, 2, 4, 5, 7]


def random_entries(draw: random.Random) -> list[Entry]:
    return [
        Entry(
            step,
            NOW - draw.random() * 1e6,
            draw.choice([None, math.nan, math.inf, draw.random(), draw.choice([0.1, 0.2])]),
            evaluated=draw.random() < 0.8,
            leased=draw.random() < 0.1,
            own=draw.random() < 0.9,
            nonfinite=draw.random() < 0.1,
        )
        for step in draw.sample(range(1000), draw.randint(0, 12))
    ]


def test_what_must_stay_stays() -> None:
    draw = random.Random(0)
    everything = 0
    for _ in range(5000):
        entries = random_entries(draw)
        keep = keeping(
            draw.randint(1, 4),
            draw.randint(0, 3),
            draw.choice([None, 1, 7]),
            draw.choice([None, 50.0]),
            draw.random() < 0.3,
        )
        stale = choose_stale(entries, keep, NOW)
        everything += len(stale)
        gone = set(steps(stale))
        mine = sorted((e for e in entries if e.own and not e.nonfinite), key=lambda e: e.step)
        for entry in stale:
            assert entry.own
            assert entry.evaluated
            assert not entry.leased
        assert not {e.step for e in mine[-keep.keep_last :]} & gone
        judged = [(e.loss, e.step) for e in mine if e.loss is not None and math.isfinite(e.loss)]
        assert not {step for _, step in sorted(judged)[: keep.keep_best]} & gone
        if keep.keep_every_steps is None and keep.keep_every_hours is None and not keep.thin:
            free = [e for e in entries if e.own and e.evaluated and not e.leased]
            assert len(free) - len(gone) <= keep.keep_last + keep.keep_best
        left = [entry for entry in entries if entry.step not in gone]
        assert keep.thin or choose_stale(left, keep, NOW) == []  # once is enough
        draw.shuffle(entries)
        assert set(steps(choose_stale(entries, keep, NOW))) == gone  # no matter in which order
    assert everything > 5000


def test_a_late_loss_can_still_make_the_best() -> None:
    """It is not deleted before it is judged, and stays when it turns out well."""
    entries = [Entry(step, NOW, loss=float(step)) for step in range(1, 6)]
    entries[2] = replace(entries[2], loss=None, evaluated=False)
    assert steps(choose_stale(entries, keeping(1, 1), NOW)) == [2, 4]
    entries[2] = replace(entries[2], loss=0.5, evaluated=True)
    assert steps(choose_stale(entries, keeping(1, 1), NOW)) == [1, 2, 4]


def test_weights_that_are_not_finite_never_push_out_good_ones() -> None:
    entries = [Entry(1, NOW, 1.0), Entry(2, NOW, 0.1, nonfinite=True), Entry(3, NOW, nonfinite=True)]
    assert steps(choose_stale(entries, keeping(1, 1), NOW)) == [2, 3]


@pytest.mark.parametrize("minutes", [7, 30, 90])
def test_thinned_with_age(minutes: int) -> None:
    """Saved for a month and thinned after each save: few stay, and at every age there is one not far off."""
    there: list[Entry] = []
    keep = keeping(last=2, best=0, thin=True)
    total = int(30 * 24 * 60 / minutes)
    for step in range(total):
        now = step * minutes * 60.0
        there.append(Entry(step, now))
        gone = set(steps(choose_stale(there, keep, now)))
        there = [entry for entry in there if entry.step not in gone]
        if step < 200:
            continue
        ages = sorted(now - entry.written for entry in there)
        assert len(there) <= 2 + 1 + math.log2(now / HOUR) + 1
        assert there[0].step == 0
        assert all(older <= 5 * max(age, HOUR) for age, older in itertools.pairwise(ages))


def test_only_own_and_sound_ones_are_touched(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 700, owner="another run")
    make(tmp_path, 4, nonfinite=True)
    (make(tmp_path, 5) / "manifest.sha256").write_text("damaged")
    found = {entry.step: entry for entry in present(tmp_path, run_id="mine", losses={1: 0.5}, pending=[2])}
    assert sorted(found) == [1, 2, 3, 4, 700]
    assert not found[700].own
    assert found[4].nonfinite
    assert not found[2].evaluated
    assert found[1].loss == 0.5
    done = tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={}, pending=[2])
    assert done.deleted == (1, 4)
    assert [path.name for path in published(tmp_path)] == [
        "checkpoint-700",
        "checkpoint-5",
        "checkpoint-3",
        "checkpoint-2",
    ]


def test_without_a_run_id(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    assert tidy(tmp_path, keeping(2, 1), run_id=None, losses={1: 0.5}).deleted == (2,)
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


@pytest.fixture
def frozen(tmp_path: Path) -> Generator[Callable[[Path], None]]:
    """frozen(path): nobody, root included, may change it."""
    done: list[Path] = []

    def freeze(path: Path) -> None:
        said = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
        if said.returncode:
            pytest.skip(f"chattr +i does not work here: {said.stderr.strip()}")
        done.append(path)

    yield freeze
    for path in done:
        subprocess.run(["chattr", "-i", str(path)], check=False)
    for path in tmp_path.rglob("kept"):
        subprocess.run(["chattr", "-i", str(path)], check=False)


@pytest.mark.process
def test_one_that_may_not_be_deleted_is_told_and_the_others_go(
    tmp_path: Path, frozen: Callable[[Path], None]
) -> None:
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    make(tmp_path, 3), make(tmp_path, 4)
    (second / "kept").write_text("x")
    frozen(first)
    frozen(second / "kept")
    done = tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={})
    assert done.deleted == (3,)
    assert sorted(done.failed) == [1, 2]
    assert all("Operation not permitted" in reason for reason in done.failed.values())
    assert [path.name for path in published(tmp_path)] == ["checkpoint-4", "checkpoint-1"]
    assert sorted(path.name for path in first.iterdir()) == ["manifest.json", "manifest.sha256"]


def test_a_name_that_is_taken_stops_one_deletion_only(tmp_path: Path) -> None:
    """What root may do, the file system still refuses: a directory cannot take a file's name."""
    make(tmp_path, 1), make(tmp_path, 2), make(tmp_path, 3)
    (tmp_path / FOLDER / ".checkpoint-1.trash").write_text("in the way")
    done = tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={})
    assert done.deleted == (2,)
    assert "Not a directory" in done.failed[1]
    assert [path.name for path in published(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


def test_a_deletion_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    make(tmp_path, 1), make(tmp_path, 2)
    trash = tmp_path / FOLDER / ".checkpoint-1.trash"
    trash.mkdir()
    (trash / STATE).write_text("{}")
    assert tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={}).deleted == (1,)
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["checkpoint-2"]


def test_gone_already(tmp_path: Path) -> None:
    make(tmp_path, 2)
    done = delete(tmp_path, [Entry(1, 0.0), Entry(2, 0.0)])
    assert done.deleted == (2,)
    assert "No such file" in done.failed[1]


def test_abandoned_ones_never_take_each_other_s_place(tmp_path: Path) -> None:
    for _ in range(3):
        for step in (1, 3, 30):
            if step > 1 or not published(tmp_path):
                make(tmp_path, step)
        assert abandon_after(tmp_path, 1) == [3, 30]
    assert sorted(os.listdir(tmp_path / "abandoned")) == [
        "checkpoint-3",
        "checkpoint-3.1",
        "checkpoint-3.2",
        "checkpoint-30",
        "checkpoint-30.1",
        "checkpoint-30.2",
    ]
