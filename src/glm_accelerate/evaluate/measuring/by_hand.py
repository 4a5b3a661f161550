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
from glm_accelerate.checkpoint.format import path_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import DataSection, EvaluateSection
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.evaluate.measuring.answers import Watch
from glm_accelerate.evaluate.measuring.exam import Exam, sample_order_of
from glm_accelerate.evaluate.measuring.examine import GlmExaminer
from glm_accelerate.evaluate.measuring.rebuild import config_and_plan, glm_examiner
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.evaluator import leased
from glm_accelerate.evaluate.protocol.history import best_step
from glm_accelerate.evaluate.protocol.messages import Findings, Request, with_finite_numbers
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
    """Evaluate a checkpoint or a snapshot in its run's directory. `base`: where its model is now."""
    weights = weights.resolve()
    run = weights.parent.parent
    examiner = glm_examiner(run, device, base=base)
    _apply(options, examiner, watch)
    step, exam_id = Reader(weights).manifest.step, examiner.exam_id
    request = Request(step, exam_id, 0, str(weights.relative_to(run)))
    results = [one for one in ledger.results(run) if one.exam_id == exam_id and one.status == "done"]
    best, baseline = best_step(run), None
    for result in results:  # of several attempts at the best step the last counts
        if result.step == best != step:
            against = path_of(run, "snapshot", result.step).relative_to(run).as_posix()
            request = replace(request, against=result.stem, against_weights=against)
    if request.against is not None:
        baseline = ledger.read_sample_losses(run, request.against)
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
    """Open any model and JSONL files; returns what evaluates it. Options left open are those of `run`."""
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
    """Evaluate any model on the samples that `inputs` calls train. `step`: of its run, if it has one."""
    store, usual = inputs.train, EvaluateSection()
    drawn = sample_order_of(store)
    exam = Exam(
        held_out=store,
        order=drawn.order,
        strata=drawn.strata,
        looks=(len(store),),
        micro_tokens=micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=usual.metrics,
        max_new_tokens=usual.max_new_tokens,
    )
    dtype = model.compute or model.embed.dtype
    by = {"device": str(model.embed.device), "dtype": str(dtype).removeprefix("torch.")}
    examiner = GlmExaminer(exam, model, by=by)
    _apply(options, examiner, watch)
    return _examine(examiner, Request(step, examiner.exam_id, 0, ""), Path(), None)


def _apply(options: EvaluationOptions, examiner: GlmExaminer, watch: Watch) -> None:
    """Apply the user's options. What reduced precision changes is measured on a few samples."""
    exam, model, total = examiner.exam, examiner.model, len(examiner.exam.order)
    samples = total if options.samples == "all" else options.samples
    examiner.exam = replace(
        exam,
        looks=exam.looks if samples is None else (min(total, samples),),
        max_new_tokens=options.max_new_tokens or exam.max_new_tokens,
        metrics=exam.metrics if options.metrics is None else tuple(options.metrics),
    )
    counts = [
        f"{count:,} {LEFT_OUT.get(why, why)}" for why, count in exam.held_out.report.dropped.items() if count
    ]
    examiner.by |= {"left_out": ", ".join(counts)} if counts else {}
    examiner.watch = watch
    if options.precision is not None:
        dtype: torch.dtype = getattr(torch, options.precision)
        if dtype != model.compute:
            compute_in(model, dtype)
        examiner.by = {**examiner.by, "dtype": options.precision}
        examiner.check = dtype != torch.float32


def _examine(examiner: GlmExaminer, request: Request, run: Path, baseline: SampleLosses | None) -> Findings:
    """Examine, in smaller passes if it runs out of memory."""
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
