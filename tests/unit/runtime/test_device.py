import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from glm_accelerate.cli.evaluate import _device
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime import device
from glm_accelerate.runtime.device import (
    memory_in_use,
    pick_device,
    pinned_like,
    reset_peak,
    resolved,
    send,
    take_device,
)
from glm_accelerate.runtime.errors import UserError

MIB = 1 << 20


def evaluator(device: str) -> object:
    return _device(argparse.Namespace(device=device, threads=None))


def test_the_device_works() -> None:
    device = pick_device()
    assert torch.ones(2, device=device).sum().item() == 2
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")


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


def test_peak_on_a_cpu_is_seen_after_the_memory_is_gone() -> None:
    device = torch.device("cpu")
    anew = reset_peak(device)
    before = memory_in_use(device)
    block = torch.ones(256 * MIB, dtype=torch.uint8)
    del block
    grown = memory_in_use(device) - before
    assert grown <= 300 * MIB
    if anew:
        assert grown >= 200 * MIB
        reset_peak(device)
        assert memory_in_use(device) - before < 100 * MIB


def test_memory_that_was_given_back_is_there_again() -> None:
    """In a process of its own: how many pages the system has to clear when tensors come and go."""
    code = """
import resource, torch
from glm_accelerate.runtime.device import keep_freed_memory
keep_freed_memory()
def step():
    return len([torch.ones(1_500_000) for _ in range(10)])
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 15_000  # as shipped twice as many
