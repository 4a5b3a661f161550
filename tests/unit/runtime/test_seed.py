import os

import pytest
import torch

from glm_accelerate.runtime.seed import repeat_exactly, repeating, seed_all, step_seed


def test_a_step_has_its_own_seed_and_always_the_same() -> None:
    seeds = [step_seed(seed, step) for seed in range(-20, 20) for step in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert [step_seed(0, step) for step in range(3)] == [step_seed(0, step) for step in range(3)]


def test_the_mapping_never_changes() -> None:
    """A run that was started by an older version resumes with the same dropout."""
    assert [step_seed(0, 0), step_seed(0, 1), step_seed(42, 1000)] == [
        0xA706DD2F4D197E6F,
        0xB382A305F4414F5E,
        0xB1FC8C824D524899,
    ]


def test_neighbours_differ_in_about_half_of_their_bits() -> None:
    pairs = [(step_seed(7, step), step_seed(7, step + 1)) for step in range(400)]
    pairs += [(step_seed(seed, 7), step_seed(seed + 1, 7)) for seed in range(400)]
    flipped = [(a ^ b).bit_count() for a, b in pairs]
    assert 31 < sum(flipped) / len(flipped) < 33
    assert min(flipped) > 10


def test_seed_and_step_do_not_stand_in_for_each_other() -> None:
    assert step_seed(1, 2) != step_seed(2, 1)
    assert len({step_seed(seed, 100 - seed) for seed in range(100)}) == 100


def test_torch_takes_every_seed() -> None:
    for seed in (0, -1, step_seed(0, 1), (1 << 64) - 1):
        seed_all(seed)
        first = torch.rand(3)
        seed_all(seed)
        assert torch.equal(first, torch.rand(3))
    seed_all(1)
    assert not torch.equal(first, torch.rand(3))


def test_on_a_gpu_sums_keep_one_order_and_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with repeat_exactly(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with repeat_exactly(torch.device("cuda")):
        # With a warning only the backward pass of attention keeps its atomic sums.
        assert torch.get_deterministic_debug_mode() == 2
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.get_deterministic_debug_mode() == 0  # what a notebook does afterwards is not refused


def test_products_that_do_not_repeat_are_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with repeat_exactly(torch.device("cuda")):
        assert torch.get_deterministic_debug_mode() == 1  # torch warns of them, and does not refuse


def test_an_operator_without_a_deterministic_form_is_named_and_runs(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    out = torch.zeros(4)

    def work() -> None:
        out.put_(torch.tensor([1]), torch.ones(1))  # it has none on a CPU either

    assert repeating(lambda: None) is None
    with pytest.warns(UserWarning, match="put_"):
        said = repeating(work)
    assert said is not None
    assert "last bits: put_ does not have a deterministic implementation" in said
    assert out[1] == 1

    def broken() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        repeating(broken)
