"""`bench data`: how fast files become samples, what each way of batching computes in vain, and how many
batches a second the pipeline makes without a model.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from glm_accelerate.bench.report import Report, Table, now, percent
from glm_accelerate.bench.run import Say, preparing
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.measure import Useful, useful_shares
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.pipeline import steps as steps_of
from glm_accelerate.data.types import Step
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import read_config
from glm_accelerate.observe.chart import Bar
from glm_accelerate.plan.ground import Ground
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import order_of, resolve
from glm_accelerate.runtime.env import cores
from glm_accelerate.runtime.words import amount, duration, number

DEFAULT_SAMPLES = 16  # in a step, to compare ways of batching where the config speaks of tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """Files read, tokenized and stored with nothing cached."""

    seconds: float
    bytes: int
    samples: int
    tokens: int
    workers: int


@dataclass(frozen=True, slots=True)
class Line:
    """The pipeline in one way of batching, without training."""

    batching: str
    steps: int
    batches: int
    tokens: int
    computed: int  # positions, padding included
    seconds: float


@dataclass(frozen=True, slots=True)
class DataFigures:
    """Preparing, ways of batching, and the pipeline in each."""

    prepared: Prepared
    opened_seconds: float  # a second time, when everything is prepared
    useful: tuple[Useful, ...]
    lines: tuple[Line, ...]
    micro_tokens: int


def measure_data(config: RunConfig, steps: int, say: Say) -> DataFigures:
    """`steps` steps go through the pipeline in each way of batching."""
    directory = locate(config.model.path)
    family, sizes, _ = read_config(directory)
    with tempfile.TemporaryDirectory(prefix="glm-accelerate-bench-") as cache:
        section = config.data.model_copy(update={"cache": cache, "dev": None})
        began = time.perf_counter()
        inputs = open_inputs(section, directory, preparing(say))
        seconds = time.perf_counter() - began
        opened = time.perf_counter()
        open_inputs(section, directory)
        opened = time.perf_counter() - opened
        prepared = Prepared(
            seconds=seconds,
            bytes=inputs.train.report.bytes,
            samples=len(inputs.train),
            tokens=int(inputs.train.lengths.sum()),
            workers=cores() if config.data.workers == "auto" else config.data.workers,
        )
        plan = resolve(config, Ground(family, sizes, inputs, detect()))
        lines: list[Line] = []
        for batching in ARRANGE:
            say(f"batching: {batching}", len(lines), len(ARRANGE))
            order, micro_tokens = order_of(inputs, config, plan.step_samples), plan.micro_tokens
            made_ahead = steps_of(
                inputs.train, order, batching=batching, micro_tokens=micro_tokens, position=0, total=steps
            )
            lines.append(_line(batching, made_ahead))
        useful = useful_shares(
            inputs.train.lengths, plan.step_samples or DEFAULT_SAMPLES, plan.micro_tokens, config.train.seed
        )
    return DataFigures(prepared, opened, useful, tuple(lines), plan.micro_tokens)


def _line(batching: str, steps: Iterator[Step]) -> Line:
    began = time.perf_counter()
    all_steps = list(steps)
    seconds = time.perf_counter() - began
    batches = [batch for step in all_steps for batch in step.batches]
    return Line(
        batching=batching,
        steps=len(all_steps),
        batches=len(batches),
        tokens=sum(step.tokens for step in all_steps),
        computed=sum(batch.tokens_RT.size for batch in batches),
        seconds=seconds,
    )


def data_report(figures: DataFigures, config: str) -> Report:
    """Speed of preparing, useful shares, and the pipeline."""
    prepared = figures.prepared
    preparing_rows = (
        ("time", duration(prepared.seconds)),
        ("speed", f"{amount(prepared.bytes / prepared.seconds)}/s"),
        ("samples a second", number(prepared.samples / prepared.seconds)),
        ("tokens a second", number(prepared.tokens / prepared.seconds)),
        ("opened again, as prepared", duration(figures.opened_seconds)),
    )
    useful = tuple((one.way, percent(one.share), percent(1 - one.share)) for one in figures.useful)
    lines = tuple(
        (
            one.batching,
            number(one.batches / one.seconds),
            number(one.tokens / one.seconds),
            duration(one.seconds / one.steps),
            percent(one.tokens / one.computed),
        )
        for one in figures.lines
    )
    return Report(
        name="data",
        title=f"The data line of {config}",
        about=(
            f"{now()}; {detect().name}, {cores()} cores",
            f"{prepared.samples:,} samples, {prepared.tokens:,} tokens, {amount(prepared.bytes)}; "
            f"{prepared.workers} processes tokenize; at most {figures.micro_tokens:,} tokens in a pass",
        ),
        tables=(
            Table("Preparing, with nothing cached", ("", ""), preparing_rows),
            Table("Useful share of what is computed", ("way of batching", "tokens", "padding"), useful),
            Table(
                "The pipeline without a model",
                ("batching", "batches a second", "tokens a second", "a step", "useful"),
                lines,
            ),
        ),
        picture=tuple(Bar(one.way, one.share, f"{percent(one.share)} useful") for one in figures.useful),
        figures={"config": config, "date": now(), **asdict(figures)},
    )
