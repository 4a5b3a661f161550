"""Gradients summed over ranks that each hold the whole model: once a step, in few large operations.

FSDP sums those of divided tensors itself. The buckets follow from the parameters' order and sizes alone, so
a resumed run adds in the same order as an uninterrupted one.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm_accelerate.parallel.ranks import Ranks

BUCKET_BYTES = 32 * 2**20


def sum_gradients(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """In place. A rank that learnt nothing adds zeros."""
    if ranks.count == 1:
        return
    for bucket in _buckets(p for p in parameters if not isinstance(p, DTensor)):
        _sum(bucket)


def _sum(bucket: Sequence[Tensor]) -> None:
    """What it takes is given back before the next bucket is made."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, so many that an operation is worth its start."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
