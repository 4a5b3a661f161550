"""Lossless compression of numbers: bytes of equal rank together (all exponents, all low bytes), then zstd.

payload = block*    block = length (4 bytes) + a zstd frame that knows its size and checks itself
A block holds a bounded share of the items, so memory stays bounded and threads have something to share.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
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
class Codec:
    """Both directions: encode(items, bytes of one item), decode(payload, bytes of one item, bytes in all)."""

    encode: Callable[[memoryview, int], bytes]
    decode: Callable[[memoryview, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured. Speeds are in MB/s of uncompressed bytes, the disk's in MB/s that it takes."""

    compress: float  # of one core
    ratio: float  # compressed bytes per byte
    disk: float
    cores: float  # that training does not need


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and why."""

    codec: Literal["none", "zstd"]
    reason: str


def encode(payload: memoryview, item_bytes: int, threads: int = 1) -> bytes:
    """Compress the bytes of a tensor whose items have so many bytes."""
    compress = partial(_compress, _zstandard(), item_bytes)
    blocks = [payload[at : at + BLOCK] for at in range(0, len(payload), BLOCK)]
    if threads == 1 or len(blocks) == 1:
        return b"".join(map(compress, blocks))
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(compress, blocks))


def decode(payload: Bytes, item_bytes: int, size: int) -> bytes:
    """The `size` bytes that `encode` was given. Raises Damaged if they cannot be had back."""
    zstandard = _zstandard()
    whole = bytearray(size)
    place = 0
    for frame in _frames(memoryview(payload)):
        try:
            length = zstandard.frame_content_size(frame)
            if not 0 < length <= min(LARGEST, size - place):  # said before it is believed: no bombs
                raise Damaged("a compressed block is damaged: it says that it holds another number of bytes")
            planes: bytes = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise Damaged(f"a compressed block is damaged: {error}") from error
        whole[place : place + length] = _items(planes, item_bytes)
        place += length
    if place != size:
        raise Damaged(f"the compressed blocks hold {place:,} of {size:,} bytes")
    return bytes(whole)


def choose(asked: Literal["auto", "none", "zstd"], measured: Speeds | None) -> CodecChoice:
    """The codec of a run. `auto` compresses only where that is known to save time."""
    if asked == "none":
        return CodecChoice("none", "as asked")
    if asked == "zstd":
        _zstandard()
        return CodecChoice("zstd", "as asked")
    if find_spec("zstandard") is None:
        return CodecChoice("none", "zstandard is not installed")
    if measured is None:
        return CodecChoice("none", "nothing is measured yet")
    if measured.cores <= 0:
        return CodecChoice("none", "training leaves no core to compress with")
    size = 2**30 / 1e6  # speeds are in MB a second
    raw = size / measured.disk
    packed = size / (measured.compress * measured.cores) + raw * measured.ratio
    said = f"1 GiB takes {packed:.1f} s compressed ({measured.ratio:.2f} of the bytes), {raw:.1f} s as it is"
    return CodecChoice("zstd" if packed < WORTH * raw else "none", said)


def weigh(sample: memoryview, item_bytes: int, disk: float, cores: int) -> CodecChoice:
    """What `auto` comes to, from a sample of a run's own tensors, the MB/s its disk took, and free cores."""
    if cores <= 0 or find_spec("zstandard") is None:
        return choose("auto", Speeds(1.0, 1.0, disk, cores))
    compress, ratio = measure(sample, item_bytes)
    return choose("auto", Speeds(compress, ratio, disk, cores))


def measure(sample: memoryview, item_bytes: int) -> tuple[float, float]:
    """MB/s of one core and ratio, on some megabytes of a run's own tensors."""
    assert len(sample) > 0
    began = time.perf_counter()
    packed = encode(sample, item_bytes)
    return len(sample) / 1e6 / (time.perf_counter() - began), len(packed) / len(sample)


def _compress(zstandard: ModuleType, item_bytes: int, block: memoryview) -> bytes:
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)  # one a thread: it has state
    frame: bytes = compressor.compress(_planes(block, item_bytes))
    return len(frame).to_bytes(PREFIX, "little") + frame


def _frames(payload: memoryview) -> Iterator[memoryview]:
    place = 0
    while place < len(payload):
        begin = place + PREFIX
        place = begin + int.from_bytes(payload[place:begin], "little")
        if not begin < place <= len(payload):
            raise Damaged("a compressed block is damaged: it ends beyond the tensor")
        yield payload[begin:place]


def _planes(block: memoryview, item_bytes: int) -> bytes:
    """First bytes of all items, then second bytes, and so on; what is left of an item at the end as it is."""
    if item_bytes == 1:
        return bytes(block)
    flat = np.frombuffer(block, np.uint8)
    whole = len(flat) // item_bytes * item_bytes
    return flat[:whole].reshape(-1, item_bytes).T.tobytes() + flat[whole:].tobytes()


def _items(planes: bytes, item_bytes: int) -> bytes:
    """The way back."""
    if item_bytes == 1:
        return planes
    flat = np.frombuffer(planes, np.uint8)
    whole = len(flat) // item_bytes * item_bytes
    return flat[:whole].reshape(item_bytes, -1).T.tobytes() + flat[whole:].tobytes()


def _zstandard() -> ModuleType:
    """Imported where it is used: it is an extra, and most runs do without."""
    try:
        import zstandard
    except ImportError as error:
        cure = "pip install 'glm-accelerate[zstd]', or checkpoint.codec: none"
        raise UserError("zstandard is not installed: compressed checkpoints need it", cure=cure) from error
    return zstandard


CODECS: Mapping[str, Codec] = MappingProxyType({"zstd": Codec(encode, decode)})
