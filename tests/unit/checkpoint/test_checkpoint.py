"""A checkpoint exists or it does not; damage is found and named; what must stay stays."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.find import latest, published
from glm_accelerate.checkpoint.format import step_of, verify
from glm_accelerate.checkpoint.load import read_parts
from glm_accelerate.checkpoint.retain import abandon_after, choose_stale, retain
from glm_accelerate.checkpoint.save import save
from glm_accelerate.runtime.errors import UserError


def make(run: Path, step: int, attempt: int = 1) -> Path:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    moments = {"a::step": torch.tensor(3.0), "a::exp_avg": torch.randn(5, 3)}
    saved = save(
        run,
        step,
        attempt,
        weights=weights,
        optimizer=moments,
        state={"position": step},
        fingerprints={"data": "d"},
        facts={"template": "glm4", "loss": None},
    )
    parts = read_parts(saved.path)
    assert all(torch.equal(parts.weights[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(parts.optimizer[name], tensor) for name, tensor in moments.items())
    assert parts.state == {"position": step}
    return saved.path


def test_round_trip_and_modes(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "checkpoint-7\n"
    assert str(tmp_path) not in "".join(file.read_text("latin-1") for file in path.iterdir())


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    draw = random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(UserError, match=r"checkpoint-1"):
                verify(path)
        file.write_bytes(whole)
        verify(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_and_missing_files_are_named(tmp_path: Path, share: float) -> None:
    path = make(tmp_path, 1)
    weights = path / "weights.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, int(size * share))
    with pytest.raises(UserError, match=rf"weights.safetensors is \d+ bytes, should be {size} bytes"):
        verify(path)
    weights.unlink()
    with pytest.raises(UserError, match=r"weights.safetensors is missing"):
        verify(path)


def test_only_full_names_are_checkpoints(tmp_path: Path) -> None:
    names = (
        "checkpoint-",
        "checkpoint-abc",
        "checkpoint-10-tmp",
        "checkpoint--5",
        "checkpoint-1e3",
        "Checkpoint-7",
    )
    odd = (
        *names,
        "tmp-checkpoint-5",
        "checkpoint-10.bak",
        "checkpoint-٣",
        "checkpoint-007",
        "checkpoint-" + "9" * 200,
    )
    for name in odd:
        assert step_of(name) is None
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-9").write_text("a file")
    for step in (9000, 10000, 2):
        make(tmp_path, step)
    assert [path.name for path in published(tmp_path)] == [
        "checkpoint-10000",
        "checkpoint-9000",
        "checkpoint-2",
    ]
    assert step_of("checkpoint-0") == 0


def test_the_newest_that_verifies_wins_whatever_the_pointer_says(tmp_path: Path) -> None:
    make(tmp_path, 3)
    newest = make(tmp_path, 9)
    (tmp_path / "checkpoints" / "latest").write_text("../../etc\n")
    assert latest(tmp_path) == (newest, [])
    (newest / "state.json").write_text("{}")
    found, reasons = latest(tmp_path)
    assert found is not None
    assert found.name == "checkpoint-3"
    assert len(reasons) == 1
    assert "state.json" in reasons[0]


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path) -> None:
    make(tmp_path, 3).rename(tmp_path / "checkpoints" / "checkpoint-30")
    with pytest.raises(UserError, match=r"the name says step 30, the manifest says 3"):
        verify(tmp_path / "checkpoints" / "checkpoint-30")


def test_a_newer_schema_is_named(tmp_path: Path) -> None:
    import hashlib

    path = make(tmp_path, 1)
    said = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**said, "schema": 99})
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(UserError, match=r"newer version \(schema 99, this is 1\)"):
        verify(path)


def test_what_stays() -> None:
    losses = {100: 3.0, 200: 1.0, 300: 2.0, 400: 5.0, 500: 4.0}
    assert choose_stale([100, 200, 300, 400, 500], losses, keep_last=2, keep_best=1) == [100, 300]
    assert choose_stale([100, 200], losses, keep_last=3, keep_best=0) == []
    assert choose_stale([9000, 10000, 11000], {}, keep_last=1, keep_best=1) == [9000, 10000]
    draw = random.Random(1)
    for _ in range(300):
        steps = draw.sample(range(1000), draw.randint(1, 12))
        scores = {step: draw.random() for step in steps if draw.random() < 0.7}
        last, best = draw.randint(1, 4), draw.randint(0, 3)
        kept = set(steps) - set(choose_stale(steps, scores, last, best))
        assert max(steps) in kept
        assert set(sorted(steps)[-last:]) <= kept
        assert set(sorted(scores, key=lambda step: scores[step])[:best]) <= kept
        assert len(kept) <= last + best


def test_retain_and_abandon(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    assert retain(tmp_path, {1: 0.5}, keep_last=2, keep_best=1) == [2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-1",
        "checkpoint-3",
        "checkpoint-4",
        "latest",
    ]
    assert abandon_after(tmp_path, 1) == [3, 4]
    make(tmp_path, 3)
    assert abandon_after(tmp_path, 1) == [3]
    assert sorted(path.name for path in (tmp_path / "abandoned").iterdir()) == [
        "checkpoint-3",
        "checkpoint-3.1",
        "checkpoint-4",
    ]


SAVE_FOREVER = """
import sys
from pathlib import Path
import torch
from glm_accelerate.checkpoint.save import save
for step in range(1, 10_000):
    save(Path(sys.argv[1]), step, 1, weights={"a": torch.full((200_000,), float(step))}, optimizer={},
         state={"position": step}, fingerprints={}, facts={})
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL at random moments of a process that does nothing but save: whatever is published verifies."""
    draw = random.Random(2)
    for round_ in range(6):
        run = tmp_path / str(round_)
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(run)])
        while not (run / "checkpoints" / "latest").exists():
            time.sleep(0.005)
        time.sleep(draw.random() * 0.15)
        process.kill()
        process.wait()
        for path in published(run):
            step = verify(path).step
            assert torch.equal(read_parts(path).weights["a"], torch.full((200_000,), float(step)))
        newest, reasons = latest(run)
        assert newest == published(run)[0]
        assert reasons == []
