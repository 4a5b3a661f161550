"""A processor may be told to be an older one, by oneDNN's variable and by PyTorch's: we believe it too."""

from pathlib import Path

import pytest

from glm_accelerate.kernels.native import build
from glm_accelerate.runtime import processor

XEON = "processor : 0\nflags : fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n\nprocessor : 1\n"
NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


@pytest.mark.parametrize(
    ("text", "said", "bfloat16", "tiles"),
    [
        (XEON, {}, True, True),
        (XEON, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False),
        (XEON, {"DNNL_MAX_CPU_ISA": "avx512_core"}, False, False),
        (XEON, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, False),
        (XEON, {"ATEN_CPU_CAPABILITY": "avx2"}, False, False),
        (XEON, {"ATEN_CPU_CAPABILITY": "avx512"}, True, True),
        ("processor : 0\nFeatures : fp asimd bf16\n", {}, True, False),
        ("processor : 0\nflags : fpu avx2\n", {}, False, False),
    ],
)
def test_flags_in_use(
    text: str,
    said: dict[str, str],
    bfloat16: bool,
    tiles: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert processor.has_bfloat16() is bfloat16
    assert ("amx_tile" in processor.processor_flags()) is tiles
    if not bfloat16 or "Features" in text:
        assert build.lacking() == "no bfloat16 products (AVX-512 BF16 or AMX) in this processor"
