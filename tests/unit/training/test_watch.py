"""What a run is told of its memory is about the run: a notebook that holds data before it is no drift."""

import pytest
import torch

from glm_accelerate.memory.estimate import PROCESS
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.host import keep_freed_memory
from glm_accelerate.training.watch import held_already, keep_to_limit

CPU = torch.device("cpu")
SMALL, MANY = 2**15, 2**13  # bytes of a tensor that the heap holds, and how many of them are 256 MiB


def test_what_the_process_held_before_is_counted_apart() -> None:
    before = held_already(CPU)
    data = torch.ones(PROCESS + 2**28, dtype=torch.uint8)
    assert held_already(CPU) - before >= 2**28
    del data
    assert held_already(CPU) - before < 2**27


def test_what_a_run_before_has_freed_is_not_held() -> None:
    keep_freed_memory()  # as every run does: the heap stays
    data = [torch.ones(SMALL, dtype=torch.uint8) for _ in range(MANY)]
    held = held_already(CPU)
    data.clear()
    assert held_already(CPU) <= max(0, held - 2**27)


def test_the_limit_of_the_config_binds_what_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    capped: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *said: capped.append(said))
    card = torch.device("cuda:0")
    keep_to_limit("auto", card)
    keep_to_limit("20GiB", CPU)
    assert capped == []
    keep_to_limit("20GiB", card)
    keep_to_limit("200GiB", card)
    assert capped == [(((20 << 30) - device_of(card).context_bytes) / (80 << 30), card), (1.0, card)]
