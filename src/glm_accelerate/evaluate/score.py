"""How good a model is on held-out samples: its loss on what it has to produce, and whether its greedy
answers are right. Each with a 95 % interval that speaks of these samples as a draw from many alike.

Letters: S positions that have a target, D documents of a batch, V vocabulary.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import IGNORED, Batch, Sample
from glm_accelerate.generate.answer import evaluating, generate
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.runtime.errors import UserError

CHUNK_BYTES = 64 * 2**20  # of float32 logits alive at once
Z = 1.959964  # of a normal distribution, 95 % lie within so many deviations

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Loss:
    """The mean over all targets. No interval can be told from a single sample."""

    mean: float
    ci95: Interval | None
    targets: int
    samples: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One question as the model read it, what it should have said, and what it said."""

    prompt: str
    reference: str
    answer: str
    right: bool


@dataclass(frozen=True, slots=True)
class Matches:
    """The share of right answers."""

    share: float
    ci95: Interval
    predictions: tuple[Prediction, ...]


@torch.inference_mode()
def held_out_loss(model: Decoder, batches: Iterable[Batch]) -> Loss:
    """Cross-entropy over every target of the batches; samples without a target don't count."""
    losses: list[NDArray[np.float64]] = []
    targets: list[NDArray[np.float64]] = []
    with evaluating(model):
        for batch in batches:
            losses_D, targets_D = _document_losses(model, batch)
            learnt = targets_D > 0
            losses.append(losses_D[learnt])
            targets.append(targets_D[learnt])
    losses_D, targets_D = np.concatenate([[], *losses]), np.concatenate([[], *targets])
    if not len(targets_D):
        raise UserError("no held-out sample has a target", cure="see what `data CONFIG` says was dropped")
    mean, ci95 = ratio(losses_D, targets_D)
    return Loss(mean, ci95, int(targets_D.sum()), len(targets_D))


def ratio(losses_D: NDArray[np.float64], targets_D: NDArray[np.float64]) -> tuple[float, Interval | None]:
    """Loss a target, with its interval. Samples differ in length, so this is a ratio of two means, and what
    varies is each sample's loss less what the mean grants it.
    """
    count, total = len(losses_D), float(targets_D.sum())
    mean = float(losses_D.sum()) / total
    if count < 2:
        return mean, None
    residuals_D = losses_D - mean * targets_D
    half = Z * math.sqrt(float(residuals_D @ residuals_D) * count / (count - 1)) / total
    return mean, (mean - half, mean + half)


def _document_losses(model: Decoder, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each document: the sum of its targets' losses, and how many targets it has."""
    device = model.embed.device
    labels_N = torch.from_numpy(batch.labels_RT).flatten()
    places_S = (labels_N != IGNORED).nonzero()[:, 0]
    hidden_RTH = model.hidden(
        torch.from_numpy(batch.tokens_RT).to(device), Layout.of_documents(batch.documents, device)
    )
    hidden_SH = hidden_RTH.flatten(0, 1)[places_S.to(device)]
    losses_S = _target_losses(model, hidden_SH, labels_N[places_S].to(device)).double().cpu().numpy()
    lengths = np.concatenate([np.asarray(row) for row in batch.documents])
    document_S = np.repeat(np.arange(len(lengths)), lengths)[places_S.numpy()]
    losses_D = np.bincount(document_S, weights=losses_S, minlength=len(lengths)).astype(np.float64)
    return losses_D, np.bincount(document_S, minlength=len(lengths)).astype(np.float64)


def _target_losses(model: Decoder, hidden_SH: Tensor, labels_S: Tensor) -> Tensor:
    """-log of the probability of each label, without keeping all logits."""
    rows = max(64, CHUNK_BYTES // (4 * model.sizes.vocabulary))
    losses = [torch.zeros(0, device=hidden_SH.device)]
    for hidden, labels in zip(hidden_SH.split(rows), labels_S.split(rows), strict=True):
        logits_SV = model.head(hidden)
        logits_SV = logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()
        losses.append(torch.nn.functional.cross_entropy(logits_SV, labels, reduction="none"))
    return torch.cat(losses)


def exact_match(
    model: Decoder,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    stops: Collection[int],
    max_new_tokens: int,
    batch: int = 16,
) -> Matches:
    """How often the greedy answer is the reference, white space around both aside. Samples without a question
    or an answer (plain documents) are left out.
    """
    cases = [case for sample in samples if (case := split(sample, stops)) is not None]
    if not cases:
        raise UserError("no held-out sample has a question and an answer", cure="evaluate.metrics: [loss]")
    prompts = [prompt for prompt, _ in cases]
    answers = generate(model, prompts, stops=stops, max_new_tokens=max_new_tokens, batch=batch)
    # Special tokens are shown, so that one too many makes an answer wrong.
    texts = [
        tuple(tokenizer.decode(ids, skip_special=False) for ids in (prompt, reference, answer))
        for (prompt, reference), answer in zip(cases, answers, strict=True)
    ]
    predictions = tuple(
        Prediction(prompt, reference, answer, reference.strip() == answer.strip())
        for prompt, reference, answer in texts
    )
    right = sum(prediction.right for prediction in predictions)
    return Matches(right / len(cases), wilson(right, len(cases)), predictions)


def split(sample: Sample, stops: Collection[int]) -> tuple[list[int], list[int]] | None:
    """A sample's prompt and reference: the last run of targets is the reference, less its stop token, and the
    prompt ends before it. So no token of the answer is ever in the prompt.
    """
    learnt = np.flatnonzero(sample.targets)
    if not len(learnt):
        return None
    breaks = np.flatnonzero(np.diff(learnt) > 1)
    first, last = int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0]), int(learnt[-1])
    prompt, reference = sample.tokens[:first].tolist(), sample.tokens[first : last + 1].tolist()
    if reference[-1] in stops:
        reference.pop()
    return (prompt, reference) if prompt and reference else None


def wilson(right: int, count: int) -> Interval:
    """The interval of a share, also near 0 and 1 and for few cases."""
    share, spread = right / count, Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
