import argparse
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from glm_accelerate.cli.options import device_from
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime import device
from glm_accelerate.runtime.device import (
    current_device,
    device_kind,
    device_lost,
    device_of,
    pinned_like,
    present_kind,
    resolved,
    send,
    take_device,
    take_local,
)
from glm_accelerate.runtime.errors import UserError


def evaluator(device: str) -> object:
    return device_from(argparse.Namespace(device=device, threads=None))


def test_the_device_works() -> None:
    device = take_device(None)
    assert torch.ones(2, device=device).sum().item() == 2
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_record_is_of_its_kind() -> None:
    for name, label, collectives in (("cpu", "", "gloo"), ("cuda", "GPU", "cpu:gloo,cuda:nccl")):
        record = device_of(f"{name}:0")
        assert (record.kind, record.label, record.collectives) == (name, label, collectives)
        assert record.device == torch.device(name, 0)
        assert record == device_of(torch.device(name, 0))
    assert device_kind("npu").kind == "cpu"  # one without a record is taken for a CPU


def test_what_a_run_takes_for_granted_of_a_gpu_it_does_not_of_a_cpu() -> None:
    """Facts that plans for a machine elsewhere are made from."""
    cpu, gpu = device_kind("cpu"), device_kind("cuda")
    for fact in ("context_bytes", "process_bytes", "float16", "wide_products", "gpu_kernels", "streams"):
        assert getattr(gpu, fact), fact
        assert not getattr(cpu, fact), fact
    assert cpu.deterministic
    assert not gpu.deterministic


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there are GPUs")
def test_a_cache_is_emptied_without_taking_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluator on the CPU beside GPUs takes no memory of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    present_kind().empty_cache()
    assert not torch.cuda.is_initialized()


def test_a_device_that_is_lost() -> None:
    assert device_lost("RuntimeError: CUDA error: device-side assert triggered")
    assert not device_lost("out of memory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there are GPUs")
def test_the_process_of_a_number_takes_the_device_of_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_local(5) == current_device() == device_of("cpu")
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert take_local(1) == device_of("cuda:1")
    assert taken == [torch.device("cuda:1")]
    with pytest.raises(UserError) as caught:
        take_local(2)
    assert str(caught.value) == "process 3 of this machine has no GPU: there are 2 (--nproc 2)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="names a GPU that is not there")
@pytest.mark.parametrize("opening", [take_device, partial(load_model, "somewhere"), evaluator])
def test_whoever_takes_a_gpu_makes_it_the_current_one(
    opening: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current one, with the addresses of the other."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises((RuntimeError, AssertionError, UserError)):  # none is here
        opening(device="cuda:1")
    assert taken == [torch.device("cuda:1")]


def test_a_device_is_that_of_its_tensors() -> None:
    named = torch.device("cpu:0")
    assert torch.empty(1, device=named).device != named
    assert torch.empty(1, device=named).device == resolved(named) == take_device("cpu:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here no memory can be pinned")
def test_what_a_gpu_reads_is_pinned_where_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.arange(6)[::2]
    assert torch.equal(send(sent, torch.device("cpu")), sent)
    with pytest.warns(UserWarning, match="cannot be pinned"):  # it was tried
        assert pinned_like(sent, torch.float32).dtype == torch.float32
    asked: list[Tensor] = []
    monkeypatch.setattr(device, "pinned_like", lambda like: asked.append(like) or torch.empty_like(like))
    with pytest.raises((RuntimeError, AssertionError)):  # there is no such device
        send(sent, torch.device("cuda:0"))
    assert [each is sent for each in asked] == [True]
