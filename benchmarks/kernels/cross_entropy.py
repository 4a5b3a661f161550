"""Projection to GLM's 151,552 words and cross-entropy, with a frozen head (LoRA) and a trained one (full).

python -m benchmarks.kernels.cross_entropy --out benchmarks/results
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.rivals import Case, Rival, Work, main
from glm_accelerate.kernels.choose import facts_of
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy

WIDTH, WORDS = 4_096, 151_552  # of GLM-4-9B
SIZES = {"judged: 128 targets": 128, "1,024 targets": 1_024, "4,096 targets": 4_096}
TINY = {"judged: 64 targets": 64}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    width, words = (32, 1_001) if tiny else (WIDTH, WORDS)
    torch.manual_seed(0)
    weight = (torch.randn(words, width, device=device) * 0.02).bfloat16()
    for name, rows in (TINY if tiny else SIZES).items():
        hidden = torch.randn(rows, width, device=device).bfloat16().requires_grad_(True)
        labels = torch.randint(0, words, (rows,), device=device)
        for trained in (False, True):
            weight.requires_grad_(trained)
            exact = None
            if name.startswith("judged"):
                wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight)]
                exact = work(plain, wide[0], wide[1], labels)
            rivals = tuple(
                Rival(rival, work(loss, hidden, weight, labels) if loss else None, "not on this machine")
                for rival, loss in losses(device).items()
            )
            yield Case(f"{name}, {'trained' if trained else 'frozen'} head", rivals, exact)


def work(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> Work:
    wanted = [x for x in (hidden, weight) if x.requires_grad]

    def run() -> list[Tensor]:
        value = loss(hidden, weight, labels)
        return [value.detach(), *torch.autograd.grad(value, wanted)]

    return run


def losses(device: torch.device) -> dict[str, Loss | None]:
    triton, torch_has = facts_of(device).triton, "linear_cross_entropy" in dir(F)
    return {
        "ours, Triton": (lambda h, w, y: linear_cross_entropy(h, w, y, form="triton")) if triton else None,
        "ours, compiled": lambda h, w, y: linear_cross_entropy(h, w, y, form="compiled"),
        "ours, eager": lambda h, w, y: linear_cross_entropy(h, w, y, form="eager"),
        "PyTorch": plain,
        "PyTorch, compiled": compiled(),
        "PyTorch's chunks": torch_chunks if torch_has else None,
        "Liger": by_liger if find_spec("liger_kernel") else None,
    }


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, reduction="sum")


@cache
def compiled() -> Loss:
    return torch.compile(plain)


def torch_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Of torch 2.13; sums in float32 are asked for, as they would be in use."""
    options = torch.nn.LinearCrossEntropyOptions(acc_policy="accurate")
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def by_liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """With sums of the weight's gradient in float32, as ours has them."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    return fused(weight, hidden, labels)


if __name__ == "__main__":
    main("cross_entropy", "Linear and cross-entropy, forward and backward, bfloat16", cases)
