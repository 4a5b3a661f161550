"""The loss of each sample, and its split into prompt and reference.

Shape suffixes: S positions that have a target, D documents of a batch, N samples, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_accelerate.data.types import IGNORED, Batch, Sample
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.generate.answer import evaluating
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout

CHUNK_BYTES = 64 * 2**20  # of float32 logits alive at once
OPENING = 2  # special tokens that every template begins with; a plain document has no others before it


@torch.inference_mode()
def document_losses(model: Decoder, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each document, row after row: the sum of its targets' losses, and its number of targets. A row's
    padding counts as a document without targets. Zeros where the model's head is on another rank.
    """
    device = model.embed.device
    labels_N = torch.from_numpy(batch.labels_RT).flatten()
    places_S = (labels_N != IGNORED).nonzero()[:, 0]
    lengths = np.concatenate([np.asarray(row) for row in batch.documents])
    with evaluating(model):
        hidden_RTH = model.hidden(
            torch.from_numpy(batch.tokens_RT).to(device),
            Layout.of_documents(batch.documents, device, batch.pieces),
        )
        if model.stage is not None and not model.stage.last:
            return np.zeros(len(lengths)), np.zeros(len(lengths))
        hidden_SH = hidden_RTH.flatten(0, 1)[places_S.to(device)]
        losses_S = _target_losses(model, hidden_SH, labels_N[places_S].to(device)).double().cpu().numpy()
    document_S = np.repeat(np.arange(len(lengths)), lengths)[places_S.numpy()]
    losses_D = np.bincount(document_S, weights=losses_S, minlength=len(lengths)).astype(np.float64)
    return losses_D, np.bincount(document_S, minlength=len(lengths)).astype(np.float64)


@torch.inference_mode()
def sample_losses(logits_of: Callable[[Tensor], Tensor], samples: Sequence[Sample]) -> SampleLosses:
    """Losses by any model, one sample at a time. `logits_of`: tokens_1T to logits_1TV, on any device. With a
    module of transformers in evaluation mode:

        sample_losses(lambda tokens_1T: module(tokens_1T.to(device)).logits, samples)
    """
    losses_N = np.zeros(len(samples))
    targets_N = np.array([sample.targets[1:].sum() for sample in samples], np.float64)
    for number in np.flatnonzero(targets_N).tolist():
        tokens_T = torch.from_numpy(samples[number].tokens).long()
        target_S = torch.from_numpy(samples[number].targets[1:]).nonzero()[:, 0]
        logits_1TV = logits_of(tokens_T[None])
        logits_SV = logits_1TV[0, target_S.to(logits_1TV.device)]
        labels_S = tokens_T[target_S + 1].to(logits_SV.device)
        losses_N[number] = torch.nn.functional.cross_entropy(
            _in_float32(logits_SV), labels_S, reduction="sum"
        ).item()
    return SampleLosses(losses_N, targets_N)


def _target_losses(model: Decoder, hidden_SH: Tensor, labels_S: Tensor) -> Tensor:
    """-log of the probability of each label, without keeping all logits."""
    rows = max(64, CHUNK_BYTES // (4 * model.sizes.vocabulary))
    losses = [torch.zeros(0, device=hidden_SH.device)]
    for hidden, labels in zip(hidden_SH.split(rows), labels_S.split(rows), strict=True):
        losses.append(
            torch.nn.functional.cross_entropy(_in_float32(model.head(hidden)), labels, reduction="none")
        )
    return torch.cat(losses)


def _in_float32(logits_SV: Tensor) -> Tensor:
    return logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()


def split(sample: Sample, stops: Collection[int]) -> tuple[list[int], list[int]] | None:
    """A sample's prompt and reference. The reference is the last run of targets without its stop token; the
    prompt ends before it, so it never contains a token of the answer. None if there is no prompt, as in a
    plain document, or no reference.
    """
    targets = np.flatnonzero(sample.targets)
    if not len(targets):
        return None
    breaks = np.flatnonzero(np.diff(targets) > 1)
    first, last = int(targets[breaks[-1] + 1] if len(breaks) else targets[0]), int(targets[-1])
    prompt, reference = sample.tokens[:first].tolist(), sample.tokens[first : last + 1].tolist()
    if reference[-1] in stops:
        reference.pop()
    return (prompt, reference) if len(prompt) > OPENING and reference else None
