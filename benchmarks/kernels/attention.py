"""Causal attention over packed documents with GLM-4-9B's heads, by every path that a machine has.

python -m benchmarks.kernels.attention --out benchmarks/results
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.rivals import Case, Rival, Work, main
from glm_accelerate.kernels.attention import attention, attention_reference
from glm_accelerate.kernels.choose import FLASH, FLEX, VARLEN, facts_of
from glm_accelerate.kernels.varlen_attention import Documents, varlen_attention

HEADS, SHARED, WIDTH = 32, 2, 128  # of GLM-4-9B
ROWS = {
    "judged: 300 tokens": (1, 170, 129),
    "4,096 tokens, one document": (4096,),
    "4,096 tokens, of a chat set": (1733, 902, 611, 380, 255, 133, 61, 21),
    "8,192 tokens, 64 documents": (128,) * 64,
    "6,000 tokens, one document": (6000,),
}
TINY = {"judged: 60 tokens": (1, 40, 19), "256 tokens": (100, 156)}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    heads, shared, width = (6, 2, 16) if tiny else (HEADS, SHARED, WIDTH)
    for name, lengths in (TINY if tiny else ROWS).items():
        torch.manual_seed(0)
        tokens = sum(lengths)
        drawn = [torch.randn(tokens, count, width, device=device) for count in (heads, shared, shared)]
        inputs = [x.bfloat16().requires_grad_(True) for x in drawn]
        gradient = torch.randn(tokens, heads, width, device=device).bfloat16()
        by_definition = partial(definition, lengths=lengths)
        exact = None
        if name.startswith("judged"):
            wide = [x.detach().double().requires_grad_(True) for x in inputs]
            exact = work(by_definition, wide, gradient.double())
        rivals = [*packed(lengths, inputs, gradient, device)]
        rivals.append(
            Rival("SDPA by document", work(partial(by_document, lengths=lengths), inputs, gradient))
        )
        rivals.append(Rival("SDPA, one dense mask", work(dense(lengths, device), inputs, gradient)))
        if exact:
            rivals.append(Rival("definition", work(by_definition, inputs, gradient)))
        yield Case(name, tuple(rivals), exact)


def work(attend: Attend, inputs: Sequence[Tensor], gradient: Tensor) -> Work:
    def run() -> list[Tensor]:
        out = attend(*inputs)  # pyright: ignore[reportCallIssue]
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]

    return run


def packed(
    lengths: Sequence[int], inputs: Sequence[Tensor], gradient: Tensor, device: torch.device
) -> Iterator[Rival]:
    facts, documents = facts_of(device), Documents.of(lengths, device)
    here = {VARLEN: facts.torch_flash, FLASH: facts.flash_attn, FLEX: facts.triton}
    for path, has in here.items():
        ours = work(partial(varlen, path, documents), inputs, gradient)
        yield Rival(path, ours if has else None, "not on this machine")


def varlen(path: str, documents: Documents, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return varlen_attention(path, q, k, v, documents)


def definition(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return attention_reference(q[None], k[None], v[None], lengths)[0]


def by_document(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return attention(q[None], k[None], v[None], lengths)[0]


def dense(lengths: Sequence[int], device: torch.device) -> Attend:
    """What most trainers do without FlashAttention: a mask of all pairs."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    seen = (number[:, None] == number).tril()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, attn_mask=seen)[0].transpose(0, 1)

    return attend


if __name__ == "__main__":
    main("attention", "Packed attention, forward and backward, bfloat16", cases)
