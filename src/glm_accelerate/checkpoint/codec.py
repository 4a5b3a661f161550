"""Lossless compression of numbers: bytes of equal rank together (all exponents, all low bytes), then zstd.

payload = block*    block = length (4 bytes) + a zstd frame that knows its size and checks itself
A block holds a bounded share of the items, so memory stays bounded and threads have something to share.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import numpy as np

from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.runtime.errors import UserError

BLOCK = 4 << 20  # bytes before compression; a multiple of every item
LARGEST = 64 << 20  # a reader takes blocks up to here
LEVEL = 1  # higher ones are slower and no smaller on weights
PREFIX = 4  # bytes of a block's length
WORTH = 0.9  # compression has to bring the time below this share: cores to spare are never quite free

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and why."""

    codec: Literal["none", "zstd"]
    reason: str


def encode(payload: memoryview, item_bytes: int) -> bytes:
    """Compress the bytes of a tensor whose items have so many bytes."""
    compressor = require_zstandard().ZstdCompressor(level=LEVEL, write_checksum=True)
    packed = bytearray()
    for begin in range(0, len(payload), BLOCK):
        frame: bytes = compressor.compress(_planes(payload[begin : begin + BLOCK], item_bytes))
        packed += len(frame).to_bytes(PREFIX, "little") + frame
    return bytes(packed)


def decode(payload: Bytes, item_bytes: int, size: int) -> bytes:
    """The `size` bytes that `encode` was given. Raises Damaged if they cannot be had back."""
    zstandard = require_zstandard()
    whole = bytearray(size)
    done = 0
    for frame in _frames(memoryview(payload)):
        try:
            length = zstandard.frame_content_size(frame)
            if not 0 < length <= min(LARGEST, size - done):  # checked before it is decompressed: no bombs
                raise Damaged("a compressed block is damaged: it says that it holds another number of bytes")
            planes: bytes = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise Damaged(f"a compressed block is damaged: {error}") from error
        whole[done : done + length] = _items(planes, item_bytes)
        done += length
    if done != size:
        raise Damaged(f"the compressed blocks hold {done:,} of {size:,} bytes")
    return bytes(whole)


def choose(sample: memoryview, item_bytes: int, disk: float, cores: int) -> CodecChoice:
    """What `auto` comes to, from a sample of a run's own tensors, the MB/s its disk took, and free cores."""
    if find_spec("zstandard") is None:
        return CodecChoice("none", "zstandard is not installed")
    if cores <= 0:
        return CodecChoice("none", "training leaves no core to compress with")
    compress, ratio = measure(sample, item_bytes)
    return faster(compress * cores, ratio, disk)


def faster(compress: float, ratio: float, disk: float) -> CodecChoice:
    """Compressed only where that saves time, at these MB/s of uncompressed bytes and of the disk."""
    size = 2**30 / 1e6
    raw = size / disk
    packed = size / compress + raw * ratio
    reason = f"1 GiB takes {packed:.1f} s compressed ({ratio:.2f} of the bytes), {raw:.1f} s as it is"
    return CodecChoice("zstd" if packed < WORTH * raw else "none", reason)


def measure(sample: memoryview, item_bytes: int) -> tuple[float, float]:
    """MB/s of one core and ratio, on some megabytes of a run's own tensors."""
    assert len(sample) > 0
    began = time.perf_counter()
    packed = encode(sample, item_bytes)
    return len(sample) / 1e6 / (time.perf_counter() - began), len(packed) / len(sample)


def _frames(payload: memoryview) -> Iterator[memoryview]:
    end = 0
    while end < len(payload):
        begin = end + PREFIX
        end = begin + int.from_bytes(payload[end:begin], "little")
        if not begin < end <= len(payload):
            raise Damaged("a compressed block is damaged: it ends beyond the tensor")
        yield payload[begin:end]


def _planes(block: memoryview, item_bytes: int) -> bytes:
    """First bytes of all items, then second bytes, and so on; what is left of an item at the end as it is."""
    if item_bytes == 1:
        return bytes(block)
    flat = np.frombuffer(block, np.uint8)
    whole = len(flat) // item_bytes * item_bytes
    return flat[:whole].reshape(-1, item_bytes).T.tobytes() + flat[whole:].tobytes()


def _items(planes: bytes, item_bytes: int) -> bytes:
    """The items of what `_planes` made."""
    if item_bytes == 1:
        return planes
    flat = np.frombuffer(planes, np.uint8)
    whole = len(flat) // item_bytes * item_bytes
    return flat[:whole].reshape(item_bytes, -1).T.tobytes() + flat[whole:].tobytes()


def require_zstandard() -> ModuleType:
    """The library, which is an extra: most runs do without."""
    try:
        import zstandard
    except ImportError as error:
        cure = "pip install 'glm-accelerate[zstd]', or checkpoint.codec: none"
        raise UserError("zstandard is not installed: compressed checkpoints need it", cure=cure) from error
    return zstandard
