"""Which attention a device gets, from facts alone: no GPU is needed to know."""

from dataclasses import replace

import pytest
import torch

from glm_accelerate.kernels.attention_path import (
    BY_DOCUMENT,
    FLASH,
    FLEX,
    VARLEN,
    Facts,
    attention_path,
    facts_of,
)

H200 = Facts("cuda", (9, 0), torch_flash=True, flash_attn=False, triton=True)
V100 = replace(H200, capability=(7, 0))
RTX_4090 = replace(H200, capability=(8, 9))
NO_FLASH = replace(H200, torch_flash=False)


@pytest.mark.parametrize(
    ("facts", "dtype", "width", "training", "path", "said"),
    [
        (H200, torch.bfloat16, 128, True, VARLEN, "one launch"),
        (H200, torch.float16, 64, False, VARLEN, "one launch"),
        (replace(H200, flash_attn=True), torch.bfloat16, 128, True, VARLEN, "one launch"),
        (replace(NO_FLASH, flash_attn=True), torch.bfloat16, 128, True, FLASH, "flash-attn has"),
        (NO_FLASH, torch.bfloat16, 128, True, FLEX, "neither torch nor"),
        (replace(NO_FLASH, triton=False), torch.bfloat16, 128, True, BY_DOCUMENT, "needs Triton"),
        (H200, torch.float32, 128, True, BY_DOCUMENT, "not float32"),
        (V100, torch.float16, 128, True, BY_DOCUMENT, "this device has 7.0"),
        (V100, torch.bfloat16, 128, True, BY_DOCUMENT, "this device has 7.0"),
        (H200, torch.bfloat16, 20, True, FLEX, "not 20"),
        (H200, torch.bfloat16, 12, True, BY_DOCUMENT, "heads of 16 to 256"),
        (H200, torch.bfloat16, 320, True, BY_DOCUMENT, "not 320"),
        (H200, torch.bfloat16, 224, True, VARLEN, "one launch"),
        (RTX_4090, torch.bfloat16, 128, True, VARLEN, "one launch"),
        (RTX_4090, torch.bfloat16, 224, True, FLEX, "does not train heads of 224 on capability 8.9"),
        (RTX_4090, torch.bfloat16, 224, False, VARLEN, "one launch"),
        (Facts("cpu"), torch.bfloat16, 128, True, BY_DOCUMENT, "do not train on cpu"),
        (Facts("npu"), torch.bfloat16, 128, True, BY_DOCUMENT, "do not train on npu"),
    ],
)
def test_path(facts: Facts, dtype: torch.dtype, width: int, training: bool, path: str, said: str) -> None:
    chosen, why = attention_path(facts, dtype, width, training)
    assert chosen == path
    assert said in why


def test_a_prefix_is_not_for_flex_attention() -> None:
    assert attention_path(H200, torch.bfloat16, 128, True, prefix=True)[0] == VARLEN
    chosen, why = attention_path(NO_FLASH, torch.bfloat16, 128, True, prefix=True)
    assert chosen == BY_DOCUMENT
    assert "no prefix" in why


def test_facts_of_this_machine() -> None:
    assert facts_of(torch.device("cpu")) == Facts("cpu")
