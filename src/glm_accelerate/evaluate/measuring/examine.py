"""One evaluation of a GLM: as many samples as the answer needs, then what it generates.

first look -losses-> compared with the best's on the same samples -enough?-> or the next look ... -> Findings
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
from glm_accelerate.data.collate import collate, empty_batch
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.pack import Arrangement, pack
from glm_accelerate.data.store import Store
from glm_accelerate.data.types import Sample
from glm_accelerate.evaluate.measuring.answers import Answers, Watch, ask
from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.losses import document_losses
from glm_accelerate.evaluate.measuring.metrics import needs_answers
from glm_accelerate.evaluate.protocol.messages import Comparison, EvaluationResult, Findings, Request
from glm_accelerate.evaluate.statistics.intervals import Items, loss_interval, paired
from glm_accelerate.evaluate.statistics.looks import level_of, looks, verdict
from glm_accelerate.evaluate.statistics.sample_order import SampleOrder, choose
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError

SEED = 0  # of the choice of samples: not the run's, so that runs compare too
CHECKED = 16  # samples on which reduced precision is compared with full

Load = Callable[[Path], None]  # puts a snapshot's weights into the model


def choice_of(store: Store) -> SampleOrder:
    """The order in which its samples are evaluated."""
    sources = np.repeat(np.arange(len(store.spans)), [span.stop - span.start for span in store.spans])
    return choose(store.lengths, sources, SEED)


def exam_of(config: RunConfig, plan: RunPlan, inputs: Inputs) -> Exam:
    """What the config asks of every step."""
    held_out, section = inputs.dev, config.evaluate
    assert held_out is not None
    choice = choice_of(held_out)
    total, most = len(held_out), plan.evaluate_samples
    return Exam(
        held_out=held_out,
        order=choice.order,
        strata=choice.strata,
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
    """Answers requests about one model. `load`: how weights come into it; None: they are there already, as
    inline, and nothing can be measured of an earlier step any more.
    """

    exam: Exam
    model: Decoder
    load: Load | None = None
    ranks: Ranks = ALONE  # all of them examine together, and find the same
    divided: bool = False  # over the ranks: then all do the same passes
    by: dict[str, str] = field(default_factory=dict[str, str])
    check: bool = False  # whether the precision is compared with float32, once
    watch: Watch = lambda what, done, total: None  # hears how far it is

    @property
    def plan(self) -> str:
        return self.exam.plan

    def examine(self, request: Request, run: str, against: Items | None) -> Findings:
        """`against`: what was measured of the step that `request` names. Raises what is wrong."""
        began = time.perf_counter()
        exam, total = self.exam, len(self.exam.order)
        if self.load is not None:
            self.load(Path(run) / request.weights)
        if self.check:
            self.check, self.by = False, {**self.by, "float32 differs by": f"{self._difference():.2g}"}
        items, compared, extended = self._loss(request, run, against)
        mean, ci95 = loss_interval(items, exam.strata, total) if len(items.losses_N) else (None, None)
        if mean is not None and not math.isfinite(mean):
            raise UserError("the held-out loss is not finite")
        count = total if request.whole else exam.looks[0]
        answers = Answers()
        try:
            if needs_answers(exam.metrics):
                sharing = ALONE if self.divided else self.ranks  # divided, it takes all ranks for each token
                answers = ask(self.model, exam, count, self.watch, sharing)
        except Exception as error:
            if mean is None or self.divided:
                raise
            answers = Answers(troubles=(_worded(error),))  # what was measured before counts
        result = EvaluationResult(
            step=request.step,
            plan=request.plan,
            attempt=request.attempt,
            status="done",
            loss=mean,
            ci95=ci95,
            samples=len(items.losses_N),
            asked=count if answers.predictions else 0,
            answers=len(answers.predictions),
            total=total,
            metrics=answers.metrics,
            intervals=answers.intervals,
            seconds=round(time.perf_counter() - began, 3),
            against=compared,
            reason="; ".join(answers.troubles) or None,
            by=self.by,
        )
        return Findings(result, items, answers.predictions, extended)

    def smaller(self) -> bool:
        """After it ran out of memory: whether passes of half the size can be tried."""
        half = self.exam.micro_tokens // 2
        if half < 64:
            return False
        self.exam = replace(self.exam, micro_tokens=half)
        return True

    def _loss(
        self, request: Request, run: str, against: Items | None
    ) -> tuple[Items, Comparison | None, Items | None]:
        """Of as many samples as are needed; the comparison; and what else was measured of the best."""
        exam, total = self.exam, len(self.exam.order)
        items, compared = Items.none(), None
        if "loss" not in exam.metrics:
            return items, None, None
        counts = (total,) if request.whole else exam.looks
        best, level = against, level_of(counts)
        for look, count in enumerate(counts, 1):
            items = items.and_then(self.measure(exam.order[len(items.losses_N) : count]))
            if best is None:
                if self.load is None:  # later steps are compared with this one, which cannot come back
                    continue
                break
            best = self._reaching(count, best, request, run)
            compared = _compare(request, exam, items, best, level, look, len(counts))
            said = "undecided" if compared is None else compared.verdict
            alone = len(best.losses_N) < count  # more of this step's would be compared with nothing
            if said in ("worse", "tied") or (self.load is not None and (said == "better" or alone)):
                break
        grown = best is not None and against is not None and len(best.losses_N) > len(against.losses_N)
        return items, compared, best if grown else None

    def _reaching(self, count: int, best: Items, request: Request, run: str) -> Items:
        """What is known of the best, of so many samples if its weights can be had."""
        measured = len(best.losses_N)
        if measured >= count or self.load is None or request.against_weights is None:
            return best
        weights = Path(run) / request.against_weights
        if not weights.is_dir():
            return best
        self.load(weights)
        more = self.measure(self.exam.order[measured:count])
        self.load(Path(run) / request.weights)
        return best.and_then(more)

    def measure(self, numbers: Sequence[int] | np.ndarray) -> Items:
        """The losses of these samples; each rank goes through its share of the passes."""
        taken = [self.exam.held_out[int(number)] for number in numbers]
        losses_N, targets_N = np.zeros(len(taken)), np.zeros(len(taken))
        if not taken:
            return Items(losses_N, targets_N)
        passes = pack([len(sample) for sample in taken], self.exam.micro_tokens)
        lacking = self._pass_through(passes, taken, losses_N, targets_N)
        failed, *both = self.ranks.total([lacking is not None, *losses_N, *targets_N])
        if lacking is not None:
            raise lacking
        if failed:
            raise UserError("another rank ran out of memory", cure="evaluate fewer samples")
        return Items(np.array(both[: len(taken)]), np.array(both[len(taken) :]))

    def _pass_through(
        self,
        passes: Sequence[Arrangement],
        taken: Sequence[Sample],
        losses_N: NDArray[np.float64],
        targets_N: NDArray[np.float64],
    ) -> RuntimeError | MemoryError | None:
        """This rank's passes. A lack of memory is returned, so that all ranks hear of it in step; where they
        compute together that cannot be.
        """
        share, done = self.ranks.count, 0
        for first in range(0, len(passes), share):
            mine = first + self.ranks.rank
            batch = collate(passes[mine], taken) if mine < len(passes) else empty_batch()
            try:
                losses_D, targets_D = document_losses(self.model, batch)
            except (RuntimeError, MemoryError) as error:
                if self.divided or not ran_out(error):
                    raise
                return error
            places = [place for row in passes[mine].rows for place in row] if mine < len(passes) else []
            losses_N[places], targets_N[places] = losses_D[: len(places)], targets_D[: len(places)]
            done += len(places)
            self.watch("held-out loss", done, len(taken))
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
    """What is published where an evaluation could not be made."""
    return Findings(
        EvaluationResult(request.step, request.plan, request.attempt, "failed", reason=_worded(error))
    )


def _worded(error: Exception) -> str:
    """What was raised. What a device or another process has come to is: nothing goes on after that."""
    if isinstance(error, UserError | OSError):
        return str(error)
    if not isinstance(error, RuntimeError | MemoryError):
        return f"{type(error).__name__}: {error}"
    if not ran_out(error):
        raise error
    return f"out of memory: {str(error).partition('. ')[0]} (evaluate fewer samples, or shorter answers)"


def _compare(
    request: Request, exam: Exam, items: Items, best: Items, level: float, look: int, declared: int
) -> Comparison | None:
    assert request.against is not None
    difference, interval = paired(items, best, exam.strata, len(exam.order), level)
    if interval is None:
        return None
    step = int(request.against.partition("-")[0])
    said = verdict(interval, exam.margin)
    return Comparison(step, request.against, difference, interval, said, look, declared)
