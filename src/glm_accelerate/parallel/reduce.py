"""Gradients summed over ranks: once a step, in few large operations.

The buckets follow from the parameters' order and sizes alone, so a resumed run adds in the same order as an
uninterrupted one.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.place import Place

BUCKET_BYTES = 32 * 2**20


def sum_gradients(parameters: Iterable[Tensor], place: Place, axes: Sequence[str]) -> None:
    """In place, over the ranks along these axes. A rank that learnt nothing adds zeros."""
    if place.count(*axes) > 1:
        for bucket in _buckets(parameters):
            _sum(bucket, place, axes)


def _sum(bucket: Sequence[Tensor], place: Place, axes: Sequence[str]) -> None:
    """The bucket's own memory is given back before the next one is filled."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local_of(parameter.grad) for parameter in bucket if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    place.sum_(flat, *axes)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to about 32 MiB: few large sums are faster than many small ones.

    With several ranks a gradient has its parameter's dtype (`Linear.learn_in`).
    """
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
