"""One evaluation that a person starts: of a run's weights with the run's own exam, or of any model.

A run's checkpoint or snapshot is evaluated as its steps were, and compared with its best step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from glm_accelerate.assemble.model import open_model
from glm_accelerate.assemble.recipe import evaluation_dtype
from glm_accelerate.checkpoint.format import place
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import DataSection
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.store import Store
from glm_accelerate.evaluate.measuring.answers import Watch
from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, sample_order_of
from glm_accelerate.evaluate.measuring.rebuild import config_and_plan, glm_examiner
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.evaluator import leased
from glm_accelerate.evaluate.protocol.history import best_step
from glm_accelerate.evaluate.protocol.messages import (
    EvaluationResult,
    Findings,
    Request,
    with_finite_numbers,
)
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

Precision = Literal["float32", "bfloat16"]
LEFT_OUT = {"no target": "without an answer"}


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What the user chose; None: as the run has it, or the default."""

    metrics: Sequence[str] | None = None
    samples: int | Literal["all"] | None = None
    max_new_tokens: int | None = None
    precision: Precision | None = None


def evaluate_run(
    weights: Path, options: EvaluationOptions, device: torch.device, watch: Watch, base: Path | None = None
) -> Findings:
    """A checkpoint or a snapshot in its run's directory. `base`: where its model is now."""
    weights = weights.resolve()
    run = weights.parent.parent
    examiner = glm_examiner(run, device, base=base)
    examiner.exam = _with_options(examiner.exam, options)
    examiner.by |= _left_out(examiner.exam.held_out)
    examiner.watch = watch
    _compute_in(examiner, options.precision)
    step = Reader(weights).manifest.step
    request = Request(step, examiner.exam_id, 0, str(weights.relative_to(run)))
    best, baseline = _best(run, step, examiner.exam_id), None
    if best is not None:
        baseline = ledger.read_sample_losses(run, best.stem)
        against = place(run, "snapshot", best.step).relative_to(run).as_posix()
        request = replace(request, against=best.stem, against_weights=against)
    with leased(run, request):
        return _examine(examiner, request, run, baseline)


def evaluation_of_files(
    weights: Path,
    run: Path | None,
    files: Sequence[str],
    options: EvaluationOptions,
    device: torch.device,
    *,
    max_tokens: int | None,
    base: Path | None,
    watch: Watch,
) -> Callable[[Watch], Findings]:
    """Any model on JSONL files, opened and ready. Options that the user left open are those of `run`."""
    data: dict[str, Any] = {}
    if run is not None:
        config, plan = config_and_plan(run)
        section = config.evaluate
        precision = str(evaluation_dtype(config, plan, device)).removeprefix("torch.")
        options = EvaluationOptions(
            section.metrics if options.metrics is None else options.metrics,
            options.samples,
            options.max_new_tokens or section.max_new_tokens,
            options.precision or cast("Precision", precision),
        )
        data = config.data.model_dump(exclude={"dev"})
    opened = open_model(weights, base=base, device=device, merged=True)
    data |= {"train": [{"path": path} for path in files], "template": opened.template}
    data |= {} if max_tokens is None else {"max_tokens": max_tokens}
    section = DataSection.model_validate(data)
    inputs, longest = open_inputs(section, opened.base, watch), section.max_tokens
    return lambda watch: evaluate_model(opened.model, inputs, options, longest, watch, opened.step or 0)


def evaluate_model(
    model: Decoder, inputs: Inputs, options: EvaluationOptions, micro_tokens: int, watch: Watch, step: int = 0
) -> Findings:
    """Any model on the samples that `inputs` calls train. `step`: of its run, if it has one."""
    store = inputs.train
    drawn = sample_order_of(store)
    exam = Exam(
        held_out=store,
        order=drawn.order,
        strata=drawn.strata,
        looks=(len(store),),
        micro_tokens=micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=("loss",),
        max_new_tokens=256,
    )
    device, dtype = model.embed.device, model.compute or model.embed.dtype
    by = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), **_left_out(store)}
    examiner = GlmExaminer(_with_options(exam, options), model, by=by, watch=watch)
    _compute_in(examiner, options.precision)
    return _examine(examiner, Request(step, examiner.exam_id, 0, ""), Path(), None)


def _with_options(exam: Exam, options: EvaluationOptions) -> Exam:
    total = len(exam.order)
    if options.samples is not None:
        exam = replace(exam, looks=(total if options.samples == "all" else min(total, options.samples),))
    if options.max_new_tokens is not None:
        exam = replace(exam, max_new_tokens=options.max_new_tokens)
    return exam if options.metrics is None else replace(exam, metrics=tuple(options.metrics))


def _left_out(held_out: object) -> dict[str, str]:
    """How many lines of the files became no sample, and why."""
    dropped = held_out.report.dropped if isinstance(held_out, Store) else {}
    counts = [f"{count:,} {LEFT_OUT.get(why, why)}" for why, count in dropped.items() if count]
    return {"left_out": ", ".join(counts)} if counts else {}


def _compute_in(examiner: GlmExaminer, precision: Precision | None) -> None:
    """With reduced precision, its difference to float32 is measured on a few samples."""
    if precision is not None:
        dtype: torch.dtype = getattr(torch, precision)
        if dtype != examiner.model.compute:
            compute_in(examiner.model, dtype)
        examiner.by = {**examiner.by, "dtype": precision}
        examiner.check = dtype != torch.float32


def _best(run: Path, step: int, exam_id: str) -> EvaluationResult | None:
    """The result of the run's best step, if that is another step and the exam is the same."""
    named = best_step(run)
    results = [one for one in ledger.results(run) if one.exam_id == exam_id and one.status == "done"]
    return next((one for one in reversed(results) if one.step == named != step), None)


def _examine(examiner: GlmExaminer, request: Request, run: Path, baseline: SampleLosses | None) -> Findings:
    """In smaller passes if it runs out of memory."""
    while True:
        try:
            findings = examiner.examine(request, str(run), baseline)
            return replace(findings, result=with_finite_numbers(findings.result))
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if not examiner.smaller():
                cure = "--max-new-tokens, --precision bfloat16, or --device cpu"
                raise UserError("out of memory even in the smallest passes", cure=cure) from error
