"""What this machine's processor can do, as far as oneDNN's and PyTorch's own switches let it.

Both have a variable that makes them take an older processor for granted; what we compile and choose has to
believe the same, or a plan would count on products that never run.
"""

import re
from pathlib import Path

from glm_accelerate.runtime import env

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # products in hardware: AVX-512, AMX, ARM
# The last of oneDNN's names for a processor without bfloat16 products, and without tiles.
NARROW = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
WITHOUT_TILES = (*NARROW, "AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16")


def processor_flags() -> set[str]:
    """The instruction sets in use."""
    text = CPUINFO.read_text() if CPUINFO.is_file() else ""
    lines = "".join(re.findall(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE))
    flags = set(re.findall(r"[a-z0-9_]+", lines))
    products, vectors = env.processor_limits()
    if products in WITHOUT_TILES or vectors in ("default", "avx2"):
        flags = {flag for flag in flags if not flag.startswith("amx_")}
    if products in NARROW or vectors in ("default", "avx2"):
        flags -= BFLOAT16
    return flags


def cpu_name() -> str:
    """The model, as the system says it."""
    text = CPUINFO.read_text() if CPUINFO.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else "CPU"


def has_bfloat16() -> bool:
    """Whether bfloat16 is multiplied in hardware."""
    return bool(processor_flags() & BFLOAT16)


def has_tiles() -> bool:
    """Whether that is done in tiles."""
    return "amx_bf16" in processor_flags()
