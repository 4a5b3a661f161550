"""What goes in comes out, damage is found, and compression is chosen only where it saves time."""

import random
import sys

import numpy as np
import pytest
import torch

from glm_accelerate.checkpoint import codec
from glm_accelerate.checkpoint.codec import choose, decode, encode, faster, measure, require_zstandard
from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.staging import as_bytes
from glm_accelerate.runtime.errors import UserError

SIZES = (0, 1, 2, 3, 4, 5, 7, 63, 64, 65, 127, 128, 129, 1000)


def trained(items: int, dtype: torch.dtype) -> memoryview:
    """Numbers as weights are: bell-shaped, small."""
    draw = torch.Generator().manual_seed(0)
    return as_bytes((torch.randn(items, generator=draw) * 0.02).to(dtype))


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_round_trip_of_any_bytes(item: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random and plain ones, of sizes that are no multiple of an item, around the borders of blocks."""
    monkeypatch.setattr(codec, "BLOCK", 64)
    draw = random.Random(item)
    for size in SIZES:
        for content in (draw.randbytes(size), bytes(size), bytes(range(256)) * (size // 256 + 1)):
            whole = content[:size]
            packed = encode(memoryview(whole), item)
            assert decode(packed, item, size) == whole


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 0.72), (torch.float16, 0.90), (torch.float32, 0.87)]
)
def test_weights_become_smaller(dtype: torch.dtype, most: float) -> None:
    content = trained(300_001, dtype)
    packed = encode(content, dtype.itemsize)
    assert decode(memoryview(packed), dtype.itemsize, len(content)) == content
    assert len(packed) / len(content) < most
    assert len(packed) < len(encode(content, 1)) * 0.97  # that is what the planes are for


def test_noise_costs_next_to_nothing() -> None:
    content = np.random.default_rng(0).bytes(9 << 20)
    packed = encode(memoryview(content), 4)
    assert len(content) < len(packed) < len(content) * 1.001
    assert decode(packed, 4, len(content)) == content


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    content = trained(600, torch.bfloat16)
    packed = encode(content, 2)
    draw = random.Random(0)
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << draw.randrange(8)
        try:
            assert decode(damaged, 2, len(content)) == content  # a bit of the frame's head may mean nothing
        except Damaged:
            continue
        assert place < codec.PREFIX + 6
    for length in range(len(packed)):
        with pytest.raises(Damaged, match="compressed block"):
            decode(packed[:length], 2, len(content))
    for size in (0, len(content) - 2, len(content) + 2):
        with pytest.raises(Damaged, match="compressed block"):
            decode(packed, 2, size)


def test_a_block_that_claims_too_much_is_not_believed() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(codec.LARGEST + 1))
    with pytest.raises(Damaged, match="another number of bytes"):
        decode(len(bomb).to_bytes(4, "little") + bomb, 4, codec.LARGEST + 1)


def test_auto_compresses_only_where_that_saves_time() -> None:
    assert faster(400, 0.7, 40).codec == "zstd"
    assert faster(400, 0.7, 40).reason == "1 GiB takes 21.5 s compressed (0.70 of the bytes), 26.8 s as it is"
    assert faster(1600, 0.7, 2000).codec == "none"
    assert faster(1600, 0.99, 40).codec == "none"  # saves nothing
    draw = random.Random(1)
    for _ in range(1000):
        compress, ratio, disk = draw.uniform(5, 7200), draw.uniform(0.1, 1.1), draw.uniform(20, 5000)
        serial = 1 / compress + ratio / disk
        if faster(compress, ratio, disk).codec == "zstd":
            assert serial < 1 / disk
        else:
            assert serial >= 0.9 / disk


def test_weighed_on_a_sample() -> None:
    sample = trained(1 << 20, torch.bfloat16)
    assert choose(sample, 2, 0.5, 4).codec == "zstd"  # half a megabyte a second: anything is faster
    assert choose(sample, 2, 1e6, 4).codec == "none"
    assert choose(sample, 2, 0.5, 0).reason == "training leaves no core to compress with"


def test_measured_on_the_run_s_own_tensors() -> None:
    speed, ratio = measure(trained(1 << 20, torch.bfloat16), 2)
    assert speed > 1
    assert 0.6 < ratio < 0.75


def test_without_the_library_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"pip install 'glm-accelerate\[zstd\]'"):
        encode(memoryview(b"abcd"), 2)
    with pytest.raises(UserError, match="zstandard is not installed"):
        require_zstandard()
    assert choose(memoryview(b"abcd"), 2, 40, 1).reason == "zstandard is not installed"
