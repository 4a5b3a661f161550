"""The list of paths says what binds, on devices that are not here too."""

from dataclasses import replace

import pytest
import torch

from glm_accelerate.kernels.choose import (
    BY_DOCUMENT,
    FLASH,
    FLEX,
    VARLEN,
    Choice,
    Facts,
    OperatorWork,
    attention_path,
    choices,
    choose_form,
    facts_of,
    form_now,
)

H200 = Facts("cuda", (9, 0), torch_flash=True, triton=True)
CPU = Facts("cpu")


def listed(facts: Facts, work: OperatorWork) -> dict[str, Choice]:
    return {choice.operator: choice for choice in choices(facts, work)}


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_triton_binds_in_every_family_and_mode(
    sandwich: bool, training: bool, dtype: torch.dtype
) -> None:
    paths = listed(H200, OperatorWork(dtype, sandwich, 128, training, compiled=False))
    between = "norm, sum and norm" if sandwich else "sum and norm"
    for operator in ("norm", between, "swiglu", "rotary positions", "cross-entropy"):
        assert "Triton" in paths[operator].path, operator
    assert paths["attention"].path == VARLEN


def test_a_gpu_without_triton_says_so() -> None:
    paths = listed(
        Facts("cuda", (9, 0), torch_flash=True), OperatorWork(torch.bfloat16, True, 128, True, False)
    )
    for operator in ("norm", "norm, sum and norm", "swiglu", "rotary positions"):
        assert paths[operator].path.startswith("PyTorch")
        assert "pip install triton" in paths[operator].why
    facts = Facts("cuda", (9, 0), torch_flash=True, no_triton="Triton needs a C compiler (gcc)")
    assert "needs a C compiler" in choose_form(facts, torch.bfloat16, compiled=False)[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_float64_is_always_eager(compiled: bool) -> None:
    assert choose_form(H200, torch.float64, compiled)[0] == "eager"


@pytest.mark.parametrize("training", [False, True])
def test_on_a_cpu_with_tiles_our_own_operators_bind(training: bool) -> None:
    listing = listed(CPU, OperatorWork(torch.bfloat16, True, 128, training, compiled=True, native=None))
    for operator in ("norm", "swiglu", "attention", "cross-entropy"):
        assert "own C++" in listing[operator].path
    assert "rotary positions" not in listing  # they are within


def test_on_a_cpu_compiled_operators_are_for_training_alone() -> None:
    training = listed(
        CPU, OperatorWork(torch.bfloat16, True, 128, training=True, compiled=True, native="no compiler")
    )
    assert training["swiglu"].path == "compiled"
    evaluation = listed(CPU, OperatorWork(torch.bfloat16, True, 128, training=False, compiled=True))
    assert evaluation["swiglu"].path.startswith("PyTorch")
    assert "training alone" in evaluation["swiglu"].why
    lacking = listed(CPU, OperatorWork(torch.bfloat16, True, 128, True, compiled=True, native="no compiler"))
    assert lacking["attention"].why == "SLOW: no compiler"
    prefixed = listed(CPU, OperatorWork(torch.bfloat16, True, 128, training=True, compiled=True, prefix=True))
    assert prefixed["rotary positions"].path.startswith("PyTorch")


def test_form_now() -> None:
    assert [form_now("compiled", training) for training in (True, False)] == ["compiled", "eager"]
    assert [form_now("triton", training) for training in (True, False)] == ["triton", "triton"]


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
