"""One evaluation of a GLM: the loss of as many samples as the comparison needs, then its answers.

first look -losses-> compared with the baseline's -decided?-> else the next look ... -> answers -> Findings
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.pack import Arrangement, pack
from glm_accelerate.data.pipeline import collate, empty_batch
from glm_accelerate.data.store import Store
from glm_accelerate.data.types import Sample
from glm_accelerate.evaluate.measuring.answers import Answers, Watch, answer_prompts
from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.losses import document_losses
from glm_accelerate.evaluate.measuring.metrics import needs_answers
from glm_accelerate.evaluate.protocol.messages import (
    Comparison,
    EvaluationResult,
    Findings,
    Request,
    failure,
)
from glm_accelerate.evaluate.statistics.intervals import SampleLosses, loss_interval, paired
from glm_accelerate.evaluate.statistics.looks import level_of, looks, verdict
from glm_accelerate.evaluate.statistics.sample_order import SampleOrder, draw_order
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError

SEED = 0  # of the order of samples: not the run's, so that runs compare too
CHECKED = 16  # samples on which reduced precision is compared with full

Load = Callable[[Path], None]  # puts a snapshot's weights into the model


def ignore_progress(what: str, done: int, total: int) -> None:
    """Nobody watches."""


def sample_order_of(store: Store) -> SampleOrder:
    """The order in which its samples are evaluated."""
    sources = np.repeat(np.arange(len(store.spans)), [span.stop - span.start for span in store.spans])
    return draw_order(store.lengths, sources, SEED)


def exam_of(config: RunConfig, plan: RunPlan, inputs: Inputs) -> Exam:
    """What the config has every step evaluated on."""
    held_out, section = inputs.dev, config.evaluate
    assert held_out is not None
    drawn = sample_order_of(held_out)
    total, most = len(held_out), plan.evaluate_samples
    return Exam(
        held_out=held_out,
        order=drawn.order,
        strata=drawn.strata,
        looks=looks(total, most) if section.samples == "auto" else (most,),
        micro_tokens=plan.micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=section.metrics,
        max_new_tokens=section.max_new_tokens,
        margin=section.margin,
    )


@dataclass(slots=True)
class GlmExaminer:
    """Evaluates requests for one model. `load` puts weights into it; None: inline, its weights are those to
    evaluate, and nothing more can be measured of an earlier step.
    """

    exam: Exam
    model: Decoder
    load: Load | None = None
    ranks: Ranks = ALONE  # all of them examine together and return the same
    divided: bool = False  # the model over the ranks: then all do the same passes
    by: dict[str, str] = field(default_factory=dict[str, str])
    check: bool = False  # whether the precision is compared with float32, once
    watch: Watch = ignore_progress

    @property
    def exam_id(self) -> str:
        return self.exam.id

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
        if mean is not None and not math.isfinite(mean):
            raise UserError("the held-out loss is not finite")
        count = total if request.whole else exam.looks[0]
        answers = Answers()
        try:
            if needs_answers(exam.metrics):
                sharing = ALONE if self.divided else self.ranks  # divided, it takes all ranks for each token
                answers = answer_prompts(self.model, exam, count, self.watch, sharing)
        except Exception as error:
            if mean is None or self.divided:
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
        exam, total = self.exam, len(self.exam.order)
        losses, comparison = SampleLosses.empty(), None
        if "loss" not in exam.metrics:
            return losses, None, None
        counts = (total,) if request.whole else exam.looks
        extended, level = baseline, level_of(counts)
        for look, count in enumerate(counts, 1):
            losses = losses.followed_by(self.measure(exam.order[len(losses.losses_N) : count]))
            if extended is None:
                if self.load is None:  # later steps are compared with this one, whose weights will be gone
                    continue
                break
            extended = self._extend(extended, count, request, run)
            comparison = _compare(request, exam, losses, extended, level, look, len(counts))
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

    def measure(self, numbers: Sequence[int] | np.ndarray) -> SampleLosses:
        """The losses of these samples; each rank computes its share of the passes."""
        samples = [self.exam.held_out[int(number)] for number in numbers]
        losses_N, targets_N = np.zeros(len(samples)), np.zeros(len(samples))
        if not samples:
            return SampleLosses(losses_N, targets_N)
        passes = pack([len(sample) for sample in samples], self.exam.micro_tokens)
        out_of_memory = self._compute(passes, samples, losses_N, targets_N)
        failed, *both = self.ranks.total([out_of_memory is not None, *losses_N, *targets_N])
        if out_of_memory is not None:
            raise out_of_memory
        if failed:
            raise UserError("another rank ran out of memory", cure="evaluate fewer samples")
        return SampleLosses(np.array(both[: len(samples)]), np.array(both[len(samples) :]))

    def _compute(
        self,
        passes: Sequence[Arrangement],
        samples: Sequence[Sample],
        losses_N: NDArray[np.float64],
        targets_N: NDArray[np.float64],
    ) -> RuntimeError | MemoryError | None:
        """This rank's passes. Running out of memory is returned, so that all ranks learn of it in step; a
        divided model cannot do that.
        """
        share, done = self.ranks.count, 0
        for first in range(0, len(passes), share):
            mine = first + self.ranks.rank
            batch = collate(passes[mine], samples) if mine < len(passes) else empty_batch()
            try:
                losses_D, targets_D = document_losses(self.model, batch)
            except (RuntimeError, MemoryError) as error:
                if self.divided or not ran_out(error):
                    raise
                return error
            places = [place for row in passes[mine].rows for place in row] if mine < len(passes) else []
            losses_N[places], targets_N[places] = losses_D[: len(places)], targets_D[: len(places)]
            done += len(places)
            self.watch("held-out loss", done, len(samples))
        return None

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
    """The error in words. Of a device, or of another rank, it is raised again: nothing goes on after that."""
    if isinstance(error, UserError | OSError):
        return str(error)
    if not isinstance(error, RuntimeError | MemoryError):
        return f"{type(error).__name__}: {error}"
    if not ran_out(error):
        raise error
    return f"out of memory: {str(error).partition('. ')[0]} (evaluate fewer samples, or shorter answers)"


def _compare(
    request: Request,
    exam: Exam,
    losses: SampleLosses,
    baseline: SampleLosses,
    level: float,
    look: int,
    declared: int,
) -> Comparison | None:
    assert request.against is not None
    difference, interval = paired(losses, baseline, exam.strata, len(exam.order), level)
    if interval is None:
        return None
    step = int(request.against.partition("-")[0])
    outcome = verdict(interval, exam.margin)
    return Comparison(step, request.against, difference, interval, outcome, look, declared)
