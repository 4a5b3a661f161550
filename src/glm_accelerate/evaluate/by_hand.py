"""One evaluation that a person asks for: of a run's weights with the run's own exam, or of any model.

A run's checkpoint or snapshot is asked what its steps were asked, and compared with its best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.evaluate import ledger
from glm_accelerate.evaluate.answers import Watch
from glm_accelerate.evaluate.choice import choose
from glm_accelerate.evaluate.exam import Exam, Findings, Items
from glm_accelerate.evaluate.examine import SEED, GlmExaminer
from glm_accelerate.evaluate.rebuild import glm_examiner
from glm_accelerate.evaluate.report import named_best
from glm_accelerate.evaluate.results import Request, Result
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person said; None: as the run has it, or the default."""

    metrics: Sequence[str] | None = None
    samples: int | Literal["all"] | None = None
    max_new_tokens: int | None = None
    precision: Precision | None = None


def of_run(weights: Path, wanted: Wanted, device: torch.device, watch: Watch) -> Findings:
    """Of a checkpoint or a snapshot in its run's directory."""
    weights = weights.resolve()
    run = weights.parent.parent
    made = glm_examiner(run, device)
    exam = _changed(made.exam, wanted)
    examiner = GlmExaminer(exam, made.model, made.load, by=made.by, check=made.check, watch=watch)
    _compute_in(examiner, wanted.precision)
    step = Reader(weights).manifest.step
    best = _best(run, step, exam.plan)
    request = Request(step, exam.plan, 0, str(weights.relative_to(run)))
    items = None
    if best is not None:
        items = ledger.read_items(run, best.stem)
        request = replace(request, against=best.stem, against_weights=f"snapshots/snapshot-{best.step}")
    with lease(weights):
        return _examined(examiner, request, run, items)


def of_model(model: Decoder, inputs: Inputs, wanted: Wanted, micro_tokens: int, watch: Watch) -> Findings:
    """Of any model, on the samples that `inputs` calls train."""
    store = inputs.train
    sources = np.repeat(np.arange(len(store.spans)), [span.stop - span.start for span in store.spans])
    choice = choose(store.lengths, sources, SEED)
    exam = Exam(
        held_out=store,
        order=choice.order,
        strata=choice.strata,
        looks=(len(store),),
        micro_tokens=micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=("loss",),
        max_new_tokens=256,
    )
    exam = _changed(exam, wanted)
    device, dtype = model.embed.device, model.compute or model.embed.dtype
    by = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    examiner = GlmExaminer(exam, model, by=by, watch=watch)
    _compute_in(examiner, wanted.precision)
    return _examined(examiner, Request(0, exam.plan, 0, ""), Path(), None)


def _changed(exam: Exam, wanted: Wanted) -> Exam:
    total = len(exam.order)
    if wanted.samples is not None:
        exam = replace(exam, looks=(total if wanted.samples == "all" else min(total, wanted.samples),))
    if wanted.max_new_tokens is not None:
        exam = replace(exam, max_new_tokens=wanted.max_new_tokens)
    return exam if wanted.metrics is None else replace(exam, metrics=tuple(wanted.metrics))


def _compute_in(examiner: GlmExaminer, precision: Precision | None) -> None:
    """In reduced precision, how far that is from full is measured on a few samples."""
    if precision is not None:
        dtype: torch.dtype = getattr(torch, precision)
        examiner.model.compute, examiner.by = dtype, {**examiner.by, "dtype": precision}
        examiner.check = dtype != torch.float32


def _best(run: Path, step: int, plan: str) -> Result | None:
    """The run's best step, if it is another one and was asked the same."""
    named = named_best(run)
    results = [one for one in ledger.results(run) if one.plan == plan and one.status == "done"]
    return next((one for one in reversed(results) if one.step == named != step), None)


def _examined(examiner: GlmExaminer, request: Request, run: Path, against: Items | None) -> Findings:
    """In smaller passes, where memory is too short for large ones."""
    while True:
        try:
            return examiner.examine(request, str(run), against)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if not examiner.smaller():
                cure = "--max-new-tokens, --precision bfloat16, or --device cpu"
                raise UserError("out of memory even in the smallest passes", cure=cure) from error
