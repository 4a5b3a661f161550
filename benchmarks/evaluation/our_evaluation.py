"""Our way: what `evaluate PATH --data FILE --metrics bleu rouge` does, with a clock around it.

python -m benchmarks.evaluation.our_evaluation JOB RESULT
"""

import time

BEGAN = time.perf_counter()

# ruff: noqa: E402
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import read, write
from benchmarks.evaluation.job import Answer, Job, Result, holds
from glm_accelerate.assemble.model import open_model
from glm_accelerate.config.schema import DataSection
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.evaluate.measuring import answers as asking
from glm_accelerate.evaluate.measuring.by_hand import EvaluationOptions, evaluate_model
from glm_accelerate.evaluate.measuring.losses import split

MAX_TOKENS = 2048  # of a sample: no question of the set is cut


class Clock:
    """Put around the one call that generates."""

    def __init__(self, call: Callable[..., list[list[int]]]) -> None:
        self.call = call
        self.seconds = 0.0
        self.tokens = 0

    def __call__(self, *words: Any, **more: Any) -> list[list[int]]:
        began = time.perf_counter()
        answers = self.call(*words, **more)
        self.seconds += time.perf_counter() - began
        self.tokens += sum(map(len, answers))
        return answers


def inputs_of(job: Job, template: str) -> Inputs:
    section = {
        "train": [{"path": job.data}],
        "template": template,
        "max_tokens": MAX_TOKENS,
        "cache": job.cache,
    }
    return open_inputs(DataSection.model_validate(section), Path(job.model))


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    opened = open_model(Path(job.model), device=job.device, dtype=getattr(torch, job.dtype), merged=True)
    inputs = inputs_of(job, opened.template)
    wanted = EvaluationOptions(metrics=("bleu", "rouge"), samples="all", max_new_tokens=job.max_new_tokens)
    clock = asking.generate = Clock(asking.generate)
    began = time.perf_counter()
    findings = evaluate_model(opened.model, inputs, wanted, MAX_TOKENS, lambda what, done, total: None)
    ended = time.perf_counter()
    assert clock.seconds > 0
    cases = [split(inputs.train[number], inputs.stops) for number in range(len(inputs.train))]
    answers = [
        Answer(one.prompt, one.reference.strip(), one.answer.strip(), one.reference, one.answer, one.scores)
        for one in findings.predictions
    ]
    result = Result(
        side="ours",
        whole=ended - began,
        generation=clock.seconds,
        metrics=ended - began - clock.seconds,
        process=ended - BEGAN,
        tokens=clock.tokens,
        shown=sum(holds(*case) for case in cases if case is not None),
        figures=dict(findings.result.metrics),
        answers=answers,
        versions={"torch": torch.__version__},
    )
    write(result_file, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
