"""A rank's files: any tool opens them, blocks tile a piece, numbers that are not finite are seen."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from glm_accelerate.checkpoint import write
from glm_accelerate.checkpoint.format import digest
from glm_accelerate.checkpoint.staging import as_bytes, in_place, plan
from glm_accelerate.checkpoint.write import PieceEntry, all_finite, blocks, write_files
from glm_accelerate.parallel.part import part_of

TENSORS = {
    "odd": torch.randn(7, 3, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "half": torch.randn(9, 3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(5),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "turned": torch.randn(4, 6).T,
    "../../etc/x": torch.ones(2),
    "名": torch.full((3,), 7, dtype=torch.int16),
}


@pytest.mark.parametrize("limit", [1, 16, 100, 1 << 20])
def test_any_tool_opens_the_file(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BLOCK", limit)
    planned = plan({"weights": {name: part_of(tensor) for name, tensor in TENSORS.items()}})
    written = write_files(tmp_path, [part for part, _ in planned], in_place(planned), 0, 1, "none")
    (name,) = written.files
    path = tmp_path / name
    assert (written.files[name].bytes, written.files[name].sha256) == (path.stat().st_size, digest(path))
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in TENSORS.items())
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    content = path.read_bytes()
    for key, stored in written.tensors["weights"].items():
        joined = b"".join(content[span.begin : span.end] for span in stored.pieces)
        assert joined == bytes(as_bytes(TENSORS[key].contiguous()))
        for span in stored.pieces:
            assert hashlib.sha256(content[span.begin : span.end]).hexdigest() == span.sha256
        if stored.pieces[0].begin < len(content):
            assert stored.pieces[0].begin % TENSORS[key].element_size() == 0
    assert (
        min(span.begin for stored in written.tensors["weights"].values() for span in stored.pieces) % 64 == 0
    )


@pytest.mark.parametrize("size", [(), (1,), (7,), (1, 1, 7), (5, 3), (1, 5, 3), (0, 3), (3, 0), (2, 3, 4)])
@pytest.mark.parametrize("limit", [1, 8, 24, 1000])
def test_blocks_tile_a_piece(size: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BLOCK", limit)
    offset = tuple(range(10, 10 + len(size)))
    part = PieceEntry("g", "n", "F32", size, offset, size, 0, math.prod(size) * 4)
    seen = torch.zeros(size, dtype=torch.int64)
    order = torch.arange(math.prod(size)).reshape(size)
    number = 0
    for low, shape, length in blocks(part):
        box = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offset, shape, strict=True))
        seen[box] += 1
        assert length == math.prod(shape) * 4
        assert order[box].flatten().tolist() == list(range(number, number + length // 4))
        number += length // 4
        row = math.prod(size[1:]) * 4 if size and size[0] > 1 else 0
        assert length <= max(limit, row, 4) or math.prod(shape) in (0, *shape)
    assert bool((seen == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(dtype: torch.dtype, odd: float, tmp_path: Path) -> None:
    name = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    extreme = torch.finfo(dtype)
    tensor = torch.tensor([0.0, -0.0, extreme.max, extreme.min, extreme.tiny, 1.0], dtype=dtype)
    assert all_finite(as_bytes(tensor), name)
    for place in range(len(tensor)):
        broken = tensor.clone()
        broken[place] = odd
        assert not all_finite(as_bytes(broken), name)
    assert all_finite(b"", name)
    assert all_finite(as_bytes(torch.full((3,), -1)), "I64")


def test_weights_and_moments_are_asked_to_be_finite(tmp_path: Path) -> None:
    """Of a moment that is not, a weight is made in the next step."""
    bad = {"a": part_of(torch.tensor([1.0, float("nan")]))}
    for group in ("weights", "optimizer"):
        planned = plan({group: bad})
        parts = [part for part, _ in planned]
        assert not write_files(tmp_path, parts, in_place(planned), 0, 1, "none").finite


@pytest.mark.parametrize("limit", [16, 1 << 20])
def test_a_compressed_file_is_a_safetensors_file_too(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    from glm_accelerate.checkpoint.codec import decode

    monkeypatch.setattr(write, "BLOCK", limit)
    planned = plan({"weights": {name: part_of(tensor) for name, tensor in TENSORS.items()}})
    parts = [part for part, _ in planned]
    written = write_files(tmp_path, parts, in_place(planned), 0, 1, "zstd")
    (name,) = written.files
    path = tmp_path / name
    content = path.read_bytes()
    assert (written.files[name].bytes, written.files[name].sha256) == (len(content), digest(path))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"codec": "zstd"}
    loaded = load_file(path)
    for key, stored in written.tensors["weights"].items():
        packed = b"".join(content[span.begin : span.end] for span in stored.pieces)
        assert bytes(as_bytes(loaded[key])) == packed
        item = TENSORS[key].element_size()
        items = b"".join(
            decode(memoryview(content[span.begin : span.end]), item, math.prod(span.shape) * item)
            for span in stored.pieces
        )
        assert items == bytes(as_bytes(TENSORS[key].contiguous()))


def test_numbers_that_compress_take_less_room(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    planned = plan({"weights": {"w": part_of((torch.randn(400, 500) / 50).bfloat16())}})
    parts = [part for part, _ in planned]
    size: dict[str, int] = {}
    for codec in ("none", "zstd"):
        (tmp_path / codec).mkdir()
        written = write_files(tmp_path / codec, parts, in_place(planned), 0, 1, codec)
        size[codec] = sum(entry.bytes for entry in written.files.values())
    assert size["zstd"] < 0.75 * size["none"]
