"""Masked softmax as Triton kernels, by the house rule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import softmax


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 1), (2, 4099)])
def test_masked_softmax(
    causal: bool,
    padded: bool,
    queries: int,
    keys: int,
    judge: Callable[..., None],
    numbers: Callable[..., Tensor],
) -> None:
    """Rows of several pieces; padding on the left, so that with a causal mask some queries see nothing."""
    scores = numbers(2, 3, queries, keys) * 2
    seen = torch.ones(2, keys, dtype=torch.bool, device=scores.device)
    seen[1, : keys // 2 + 1] = False
    mask = seen if padded else None
    judge(
        lambda x: softmax.masked_softmax(x, 0.3, causal=causal, keys_BS=mask, form="triton"),
        lambda x: softmax.masked_softmax_reference(x, 0.3, causal=causal, keys_BS=mask),
        [scores],
    )


def test_large_scores_in_any_order_do_not_overflow(numbers: Callable[..., Tensor]) -> None:
    rising = torch.linspace(-3e4, 3e4, 5000, device=numbers(1).device)
    for scores in (rising, rising.flip(0)):
        out = softmax.masked_softmax(scores.view(1, 1, 1, -1), 1.0, causal=False, form="triton")
        assert torch.allclose(out.flatten(), scores.softmax(0), atol=1e-6)
