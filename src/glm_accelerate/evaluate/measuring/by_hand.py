"""One evaluation that a person asks for: of a run's weights with the run's own exam, or of any model.

A run's checkpoint or snapshot is asked what its steps were asked, and compared with its best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch

from glm_accelerate.assemble.recipe import evaluation_dtype
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.store import Store
from glm_accelerate.evaluate.measuring.answers import Watch
from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, choice_of
from glm_accelerate.evaluate.measuring.rebuild import glm_examiner, said_of
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.evaluator import holding
from glm_accelerate.evaluate.protocol.history import named_best
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings, Request, sound
from glm_accelerate.evaluate.statistics.intervals import Items
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

Precision = Literal["float32", "bfloat16"]
LEFT_OUT = {"no target": "without an answer"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person said; None: as the run has it, or the default."""

    metrics: Sequence[str] | None = None
    samples: int | Literal["all"] | None = None
    max_new_tokens: int | None = None
    precision: Precision | None = None


def as_run(run: Path, wanted: Wanted, device: torch.device) -> tuple[RunConfig, Wanted]:
    """What a run was told, and what is asked of it on other data: what a person says, else as it asks."""
    config, plan = said_of(run)
    section = config.evaluate
    precision = str(evaluation_dtype(config, plan, device)).removeprefix("torch.")
    return config, Wanted(
        section.metrics if wanted.metrics is None else wanted.metrics,
        wanted.samples,
        wanted.max_new_tokens or section.max_new_tokens,
        wanted.precision or cast("Precision", precision),
    )


def of_run(
    weights: Path, wanted: Wanted, device: torch.device, watch: Watch, base: Path | None = None
) -> Findings:
    """Of a checkpoint or a snapshot in its run's directory. `base`: where its model is now."""
    weights = weights.resolve()
    run = weights.parent.parent
    made = glm_examiner(run, device, base=base)
    exam = _changed(made.exam, wanted)
    by = {**made.by, **_left_out(exam.held_out)}
    examiner = GlmExaminer(exam, made.model, made.load, by=by, check=made.check, watch=watch)
    _compute_in(examiner, wanted.precision)
    step = Reader(weights).manifest.step
    best = _best(run, step, exam.plan)
    request = Request(step, exam.plan, 0, str(weights.relative_to(run)))
    items = None
    if best is not None:
        items = ledger.read_items(run, best.stem)
        request = replace(request, against=best.stem, against_weights=f"snapshots/snapshot-{best.step}")
    with holding(run, request):
        return _examined(examiner, request, run, items)


def of_model(
    model: Decoder, inputs: Inputs, wanted: Wanted, micro_tokens: int, watch: Watch, step: int = 0
) -> Findings:
    """Of any model, on the samples that `inputs` calls train. `step`: of its run, if it has one."""
    store = inputs.train
    choice = choice_of(store)
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
    by = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), **_left_out(store)}
    examiner = GlmExaminer(exam, model, by=by, watch=watch)
    _compute_in(examiner, wanted.precision)
    return _examined(examiner, Request(step, exam.plan, 0, ""), Path(), None)


def _changed(exam: Exam, wanted: Wanted) -> Exam:
    total = len(exam.order)
    if wanted.samples is not None:
        exam = replace(exam, looks=(total if wanted.samples == "all" else min(total, wanted.samples),))
    if wanted.max_new_tokens is not None:
        exam = replace(exam, max_new_tokens=wanted.max_new_tokens)
    return exam if wanted.metrics is None else replace(exam, metrics=tuple(wanted.metrics))


def _left_out(held_out: object) -> dict[str, str]:
    """Of what is in the files, what became no sample, and why."""
    dropped = held_out.report.dropped if isinstance(held_out, Store) else {}
    said = [f"{count:,} {LEFT_OUT.get(why, why)}" for why, count in dropped.items() if count]
    return {"left_out": ", ".join(said)} if said else {}


def _compute_in(examiner: GlmExaminer, precision: Precision | None) -> None:
    """In reduced precision, how far that is from full is measured on a few samples."""
    if precision is not None:
        dtype: torch.dtype = getattr(torch, precision)
        if dtype != examiner.model.compute:
            compute_in(examiner.model, dtype)
        examiner.by = {**examiner.by, "dtype": precision}
        examiner.check = dtype != torch.float32


def _best(run: Path, step: int, plan: str) -> EvaluationResult | None:
    """The run's best step, if it is another one and was asked the same."""
    named = named_best(run)
    results = [one for one in ledger.results(run) if one.plan == plan and one.status == "done"]
    return next((one for one in reversed(results) if one.step == named != step), None)


def _examined(examiner: GlmExaminer, request: Request, run: Path, against: Items | None) -> Findings:
    """In smaller passes, where memory is too short for large ones."""
    while True:
        try:
            findings = examiner.examine(request, str(run), against)
            return replace(findings, result=sound(findings.result))
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if not examiner.smaller():
                cure = "--max-new-tokens, --precision bfloat16, or --device cpu"
                raise UserError("out of memory even in the smallest passes", cure=cure) from error
