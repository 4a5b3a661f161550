"""Any region of any tensor, whatever wrote it; damage is found where it is read."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_accelerate.checkpoint import write as writing
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.parallel.part import Part, part_of
from glm_accelerate.runtime.errors import UserError


def cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """Like torch.chunk, uneven and with empty ones at the end."""
    step = -(-length // parts)
    return [(min(i * step, length), min((i + 1) * step, length)) for i in range(parts)]


def write(run: Path, tensors: dict[str, Tensor], ranks: int, axes: dict[str, int]) -> Path:
    """A checkpoint whose tensors are divided over ranks, each along an axis of its own."""
    from concurrent.futures import ThreadPoolExecutor

    def one(rank: int) -> str | None:
        pieces: dict[str, Part] = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 0:
                if rank == ranks - 1:
                    pieces[name] = part_of(tensor)
                continue
            axis = axes[name]
            begin, end = cuts(tensor.shape[axis], ranks)[rank]
            offset = tuple(begin if i == axis else 0 for i in range(tensor.ndim))
            part = tensor.narrow(axis, begin, end - begin)
            pieces[name] = Part(part, tuple(tensor.shape), offset)
        checkpointer = Checkpointer(run, rank=rank, ranks=ranks, limit=20)
        checkpointer.save(Save(1, 1, {"weights": pieces}, {"rank": rank}, {}, {}))
        (outcome,) = checkpointer.outcomes()
        return outcome.error

    with ThreadPoolExecutor(ranks) as pool:
        assert list(pool.map(one, range(ranks))) == [None] * ranks
    return run / "checkpoints" / "checkpoint-1"


def regions(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every box in a small shape."""
    edges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for box in itertools.product(*edges):
        yield tuple(a for a, _ in box), tuple(b - a for a, b in box)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_region_at_every_number_of_ranks(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BLOCK", 24)  # several blocks in a piece
    tensors = {
        "rows": torch.randn(7, 3),
        "columns": torch.randn(3, 7).bfloat16(),
        "middle": torch.randn(2, 5, 3),
        "line": torch.arange(11),
        "few": torch.randn(1, 2),
        "scalar": torch.tensor(4.0),
    }
    axes = {"rows": 0, "columns": 1, "middle": 1, "line": 0, "few": 0}
    reader = Reader(write(tmp_path, tensors, ranks, axes))
    assert sorted(reader.names("weights")) == sorted(tensors)
    assert reader.names("optimizer") == []
    assert reader.state() == {"rank": 0}
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor("weights", name), tensor)
        for offset, shape in regions(tuple(tensor.shape)):
            wanted = tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
            got = reader.tensor("weights", name, offset, shape)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, wanted), (name, offset, shape)
    assert torch.equal(reader.tensor("weights", "rows", (2, 1)), tensors["rows"][2:, 1:])


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half of the file may be gone."""
    monkeypatch.setattr(writing, "BLOCK", 4096)
    tensor = torch.randn(64, 64)
    path = write(tmp_path, {"a": tensor}, 1, {"a": 0})
    file = path / "weights-0-of-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 + 64] + bytes(len(content) // 2 - 64))
    reader = Reader(path)
    assert torch.equal(reader.tensor("weights", "a", (16, 0), (16, 64)), tensor[16:32])
    with pytest.raises(Damaged, match=r"weights-0-of-1.safetensors is damaged: its SHA-256"):
        reader.tensor("weights", "a", (16, 0), (17, 1))


def test_each_flipped_byte_of_a_payload_is_found(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.ones(4).bfloat16()}
    path = write(tmp_path, tensors, 1, {"a": 0, "b": 0})
    file = path / "weights-0-of-1.safetensors"
    whole = file.read_bytes()
    reader = Reader(path)
    start = min(
        span.begin for stored in reader.manifest.tensors["weights"].values() for span in stored.pieces
    )
    for place in range(start, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        file.write_bytes(damaged)
        with pytest.raises(Damaged, match=file.name):
            reader.group("weights")
    file.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match=r"weights-0-of-1.safetensors is 259 bytes, should be 260 bytes"):
        reader.group("weights")
    file.unlink()
    with pytest.raises(Damaged, match=r"weights-0-of-1.safetensors cannot be read"):
        reader.group("weights")
    (path / "state.json").write_text('{"position": 2}')
    with pytest.raises(Damaged, match=r"state.json is damaged"):
        reader.state()


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a whole checkpoint"):
        Reader(tmp_path)
