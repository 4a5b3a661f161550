"""One evaluation of a GLM: the loss of as many samples as the comparison needs, then its answers.

first look -losses-> compared with the baseline's -decided?-> else the next look ... -> answers -> Findings
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from glm_accelerate.data.pack import arranged, pack
from glm_accelerate.data.pipeline import collate, empty_batch
from glm_accelerate.evaluate.measuring.answers import Answers, Watch, answer_prompts
from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.losses import document_losses
from glm_accelerate.evaluate.measuring.metrics import needs_answers
from glm_accelerate.evaluate.protocol.evaluator import reason_of
from glm_accelerate.evaluate.protocol.messages import (
    Comparison,
    EvaluationResult,
    Findings,
    Request,
    failure,
)
from glm_accelerate.evaluate.statistics.intervals import SampleLosses, loss_interval, paired
from glm_accelerate.evaluate.statistics.samples import level_of, verdict
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.place import SINGLE, TENSOR, Place
from glm_accelerate.parallel.ranks import ALONE
from glm_accelerate.runtime.errors import UserError

CHECKED = 16  # samples on which reduced precision is compared with full

Load = Callable[[Path], None]  # puts a snapshot's weights into the model


def ignore_progress(what: str, done: int, total: int) -> None:
    """Take no notice."""


@dataclass(slots=True)
class GlmExaminer:
    """Evaluates requests for one model. `load` puts weights into it; None: inline, its weights are those to
    evaluate, and nothing more can be measured of an earlier step. All ranks of `place` examine together and
    return the same; those that divide the model among them do the same passes.
    """

    exam: Exam
    model: Decoder
    load: Load | None = None
    place: Place = SINGLE
    by: dict[str, str] = field(default_factory=dict[str, str])
    check: bool = False  # whether the precision is compared with float32, once
    watch: Watch = ignore_progress

    @property
    def exam_id(self) -> str:
        return self.exam.id

    @property
    def _divided(self) -> bool:
        return self.place.count("pipeline", "shard", *TENSOR) > 1

    def examine(self, request: Request, run: str, baseline: SampleLosses | None) -> Findings:
        """`baseline`: the losses of the step that the request is compared with."""
        began = time.perf_counter()
        exam, total = self.exam, len(self.exam.order)
        if self.load is not None:
            self.load(Path(run) / request.weights)
        if self.check:
            self.check, self.by = False, {**self.by, "float32 differs by": f"{self._difference():.2g}"}
        losses, comparison, more_baseline = self._loss(request, run, baseline)
        mean, ci95 = loss_interval(losses, exam.strata, total) if len(losses.losses_N) else (None, None)
        count = self._counts(request)[0]
        answers = Answers()
        try:
            if needs_answers(exam.metrics):
                # A divided model takes all ranks for each token.
                sharing = ALONE if self._divided else self.place.ranks
                answers = answer_prompts(self.model, exam, count, self.watch, sharing)
        except Exception as error:
            if mean is None or self._divided:
                raise
            answers = Answers(failures=(_reason(error),))  # the loss counts all the same
        result = EvaluationResult(
            step=request.step,
            exam_id=request.exam_id,
            attempt=request.attempt,
            status="done",
            loss=mean,
            ci95=ci95,
            samples=len(losses.losses_N),
            asked=count if answers.predictions else 0,
            answers=len(answers.predictions),
            total=total,
            metrics=answers.metrics,
            intervals=answers.intervals,
            seconds=round(time.perf_counter() - began, 3),
            against=comparison,
            reason="; ".join(answers.failures) or None,
            by=self.by,
        )
        return Findings(result, losses, answers.predictions, more_baseline)

    def _counts(self, request: Request) -> tuple[int, ...]:
        """Numbers of samples after which to look whether they are enough."""
        if request.whole:
            return (len(self.exam.order),)
        looks, most = self.exam.looks, request.at_most
        if most is None or most >= looks[-1]:
            return looks
        return (*(look for look in looks if 2 * look <= most), most)

    def smaller(self) -> bool:
        """After it ran out of memory: whether passes of half the size can be tried."""
        half = self.exam.micro_tokens // 2
        if half < 64:
            return False
        self.exam = replace(self.exam, micro_tokens=half)
        return True

    def _loss(
        self, request: Request, run: str, baseline: SampleLosses | None
    ) -> tuple[SampleLosses, Comparison | None, SampleLosses | None]:
        """The losses of as many samples as are needed; the comparison; the baseline's, if it has more now."""
        exam, comparison, extended = self.exam, None, baseline
        losses = SampleLosses.of([], [])
        if "loss" not in exam.metrics:
            return losses, None, None
        counts = self._counts(request)
        for look, count in enumerate(counts, 1):
            losses = losses.followed_by(self.measure(exam.order[len(losses.losses_N) : count]))
            if extended is None:
                if self.load is None:  # later steps are compared with this one, whose weights will be gone
                    continue
                break
            extended = self._extend(extended, count, request, run)
            comparison = self._compare(request, losses, extended, look, counts)
            outcome = "undecided" if comparison is None else comparison.verdict
            exhausted = len(extended.losses_N) < count  # the baseline has no more samples to compare with
            if outcome in ("worse", "tied") or (self.load is not None and (outcome == "better" or exhausted)):
                break
        if baseline is None or extended is None or len(extended.losses_N) <= len(baseline.losses_N):
            return losses, comparison, None
        return losses, comparison, extended

    def _extend(self, baseline: SampleLosses, count: int, request: Request, run: str) -> SampleLosses:
        """The baseline's losses of `count` samples, if its weights are still there."""
        measured = len(baseline.losses_N)
        if measured >= count or self.load is None or request.against_weights is None:
            return baseline
        weights = Path(run) / request.against_weights
        if not weights.is_dir():
            return baseline
        self.load(weights)
        more = self.measure(self.exam.order[measured:count])
        self.load(Path(run) / request.weights)
        return baseline.followed_by(more)

    def _compare(
        self,
        request: Request,
        losses: SampleLosses,
        baseline: SampleLosses,
        look: int,
        counts: Sequence[int],
    ) -> Comparison | None:
        exam, level = self.exam, level_of(counts)
        difference, interval = paired(losses, baseline, exam.strata, len(exam.order), level)
        if interval is None:
            return None
        assert request.against is not None
        step = int(request.against.partition("-")[0])
        outcome = verdict(interval, exam.margin)
        return Comparison(step, request.against, difference, interval, outcome, look, len(counts))

    def measure(self, numbers: Sequence[int] | np.ndarray) -> SampleLosses:
        """The losses of these samples; each rank computes its share of the passes."""
        samples = [self.exam.held_out[int(number)] for number in numbers]
        losses_N, targets_N = np.zeros(len(samples)), np.zeros(len(samples))
        if not samples:
            return SampleLosses(losses_N, targets_N)
        lengths, (rank, ranks), done = [len(sample) for sample in samples], self.place.samples, 0
        context, micro_tokens = self.place.axes.context, self.exam.micro_tokens
        if context > 1:
            passes = arranged(lengths, "pack", micro_tokens, ranks, context)
        else:
            laid = pack(lengths, micro_tokens)
            passes = [laid[each::ranks] for each in range(ranks)]
        out_of_memory: RuntimeError | MemoryError | None = None
        try:
            for mine in zip_longest(passes[rank], range(max(map(len, passes)))):
                batch = collate(mine[0], samples) if mine[0] is not None else empty_batch()
                losses_D, targets_D = document_losses(self.model, batch)
                places = [] if mine[0] is None else mine[0].places
                np.add.at(losses_N, places, losses_D[: len(places)])
                np.add.at(targets_N, places, targets_D[: len(places)])
                done += batch.samples
                self.watch("held-out loss", done, len(samples))
        except (RuntimeError, MemoryError) as error:
            if self._divided or context > 1 or not ran_out(error):
                raise
            out_of_memory = error  # all ranks learn of it in step
        failed, *both = self.place.total([out_of_memory is not None, *losses_N, *targets_N])
        if out_of_memory is not None:
            raise out_of_memory
        if failed:
            raise UserError("another rank ran out of memory", cure="evaluate fewer samples")
        return SampleLosses.of(both[: len(samples)], both[len(samples) :])

    def _difference(self) -> float:
        """How far the loss of a few samples is from that in float32."""
        few = self.exam.order[:CHECKED]
        reduced = self.measure(few)
        compute, compiled = self.model.compute, self.model.compiled
        compute_in(self.model, torch.float32)
        full = self.measure(few)
        compute_in(self.model, compute, compiled=compiled)
        return float(reduced.losses_N.sum() - full.losses_N.sum()) / max(1.0, float(full.targets_N.sum()))


def failed(request: Request, error: Exception) -> Findings:
    """What is published of an evaluation that raised an error."""
    return Findings(failure(request, "failed", _reason(error)))


def _reason(error: Exception) -> str:
    """The error in words. A device or another rank that failed is raised again: nothing goes on after it."""
    if isinstance(error, RuntimeError) and not ran_out(error):
        raise error
    return reason_of(error)
