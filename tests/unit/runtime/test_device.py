import torch

from glm_accelerate.runtime.device import memory_in_use, pick_device, reset_peak

MIB = 1 << 20


def test_the_device_works() -> None:
    device = pick_device()
    assert torch.ones(2, device=device).sum().item() == 2
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")


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
