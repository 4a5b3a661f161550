"""All evaluations of a run as a page and a picture: RUN/evals/report.md and report.svg.

evals/*.json -> one table for each exam -> the best, the decisions, what it cost, some answers
events.jsonl -> the training loss, decisions, seconds for which training waited
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import cast

from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.protocol.history import best_step, main_exam, main_results, scored_steps
from glm_accelerate.evaluate.protocol.ledger import PREDICTIONS, Listing, listing, results
from glm_accelerate.evaluate.protocol.messages import FOLDER, EvaluationResult, full_exam_id
from glm_accelerate.evaluate.report.picture import held_out_curve
from glm_accelerate.evaluate.statistics.decide import gains
from glm_accelerate.evaluate.statistics.intervals import Interval
from glm_accelerate.observe.chart import losses
from glm_accelerate.observe.events import Event, read_events
from glm_accelerate.observe.figures import FEWEST_TO_COMPARE, above_zero, compared, enclosed, metric, number
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import write_text

QUESTIONS = 3  # shown with their answers
LONGEST = 700  # characters of a text: of a prompt the last ones, of an answer the first


def report(run: Path) -> Path:
    """Write both files; returns the page."""
    evaluations, events = listing(run), read_events(run / "events.jsonl")
    if not evaluations.results and not evaluations.waiting:
        cure = "say data.dev=2% (or a file) when it trains"
        raise UserError("nothing was evaluated in this run", where=run, cure=cure)
    course, config, page = main_results(evaluations.results), run / "config.yaml", run / FOLDER / "report.md"
    margin = load_config(config).evaluate.margin if config.is_file() else 0.0
    better, best = gains(scored_steps(course), margin), best_step(run)
    named = best is not None  # else training has not taken the results over yet
    best = better[-1] if better and not named else best
    title = f"Evaluations of {run.resolve().name}"
    curve, word = losses(events, "step"), "best" if named else "so far"
    write_text(page.with_suffix(".svg"), held_out_curve(curve, course, better, best, title, word))
    lines = [
        f"# {_cell(title)}\n",
        "![held-out loss over steps](report.svg)\n",
        *_best(evaluations.results, best, named),
        *_tables(evaluations.results),
        *_missing(evaluations),
        *_decisions(events),
        *_cost(run, events),
        *_answers(run, course, best),
    ]
    write_text(page, "\n".join(lines) + "\n")
    return page


def best_so_far(run: Path) -> str:
    """The best step that training named, as the end of a line."""
    most = _most(results(run), best_step(run))
    if most is None or most.loss is None:
        return ""
    samples = f"{most.samples:,} of {most.total:,}"
    return f" · best: step {most.step:,}, loss {enclosed(most.loss, most.ci95)} ({samples})"


def _most(results: Sequence[EvaluationResult], step: int | None) -> EvaluationResult | None:
    """The result of a step that has a loss, on the most samples."""
    about = [result for result in results if result.step == step and result.loss is not None]
    return max(about, key=lambda one: one.samples, default=None)


def _best(results: Sequence[EvaluationResult], step: int | None, named: bool) -> Iterator[str]:
    most = _most(results, step)
    if most is None or most.loss is None:
        return
    if most.samples >= most.total:
        enough = f"on all {most.total:,} held-out samples."
    else:
        compare = "enough to compare steps, " if most.samples >= FEWEST_TO_COMPARE else ""
        enough = (
            f"on {most.samples:,} of {most.total:,} held-out samples: {compare}not for a figure "
            "to publish (`evaluate RUN --samples all`)."
        )
    best = f"**Best: step {most.step:,}**"
    if not named:
        best = f"**So far: step {most.step:,}** (training has not taken it over yet)"
    yield f"{best}, loss {enclosed(most.loss, most.ci95)}, {enough}\n"


def _missing(evaluations: Listing) -> Iterator[str]:
    if evaluations.waiting:
        steps = ", ".join(f"{request.step:,}" for request in evaluations.waiting)
        yield f"Asked and not answered yet: steps {steps}.\n"
    yield from (f"- {_cell(reason)}\n" for reason in evaluations.passed_over)


def _tables(results: Sequence[EvaluationResult]) -> Iterator[str]:
    """A table for each exam, the run's main one first; figures of different exams don't compare."""
    main = main_exam(results)
    for exam_id in dict.fromkeys([main, *(result.exam_id for result in results)]):
        about = [result for result in results if result.exam_id == exam_id]
        if not about:
            continue
        other = (
            "The finalists, on all held-out samples"
            if exam_id == full_exam_id(main)
            else f"Other questions ({exam_id}): not to be compared"
        )
        yield f"## {'What was measured' if exam_id == main else other}\n"
        names = sorted({name for result in about for name in result.metrics})
        heads = ["step", "loss", "95 % interval", "samples", "against", *names, "seconds", "where", "status"]
        yield f"| {' | '.join(map(_cell, heads))} |"
        yield f"|{'---:|' * (len(heads) - 2)}---|---|"
        yield from (f"| {' | '.join(_row(result, names))} |" for result in about)
        yield ""
    yield (
        "An interval is for the figure that all held-out samples would give; what other data or another seed "
        "would change is not in it. `against`: the step that was the best when the evaluation was asked, on "
        "the same samples, one by one, which tells steps apart far sooner than two intervals do; in the "
        "picture a step that was no better than the best before it is hollow.\n"
    )


def _row(result: EvaluationResult, names: Sequence[str]) -> Iterator[str]:
    loss, interval = result.loss, above_zero(result.ci95)
    yield f"{result.step:,}"
    yield "" if loss is None else enclosed(loss, interval).partition(" ")[0]
    yield "" if loss is None or interval is None else _between(interval, "{:.4f}".format)
    yield f"{result.samples:,} of {result.total:,}" if result.samples else ""
    yield "" if result.against is None else compared(asdict(result.against))
    for name in names:
        value, ends = result.metrics.get(name), result.intervals.get(name)
        yield "" if value is None else metric(value) + (f" ({_between(ends, metric)})" if ends else "")
    yield f"{result.seconds:,.1f}" if result.seconds else ""
    yield _cell(" ".join(result.by[key] for key in ("where", "device", "host") if key in result.by))
    yield _cell(result.status if result.reason is None else f"{result.status}: {result.reason}")


def _between(interval: Interval, write: Callable[[float], str]) -> str:
    """Both ends of an interval; one without width is exact."""
    low, high = interval
    return "exact" if low == high else f"{write(low)} to {write(high)}"


def _decisions(events: Sequence[Event]) -> Iterator[str]:
    decisions = [event for event in events if event["kind"] == "decision" and number(event, "step") > 0]
    if decisions:
        yield "## Decisions\n"
        for event in decisions:
            yield f"- step {number(event, 'step'):,.0f}: {_cell(str(event.get('said', '')))}"
        yield ""


def _cost(run: Path, events: Sequence[Event]) -> Iterator[str]:
    """How long training waited, and how long its steps took."""
    try:
        inline = json.loads((run / "plan.json").read_text(encoding="utf-8"))["evaluate_where"] == "inline"
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: the next start writes it again
        inline = False
    kind, field, what = "snapshot", "blocked_seconds", "snapshots"
    if inline:
        kind, field, what = "eval", "seconds", "evaluations"
    waits = [number(event, field) for event in events if event["kind"] == kind]
    steps = [number(event, "seconds") for event in events if event["kind"] == "step"]
    if waits and steps:
        total = sum(steps) + sum(waits)
        yield "## What it cost training\n"
        yield (
            f"It waited {sum(waits):,.2f} s for {len(waits):,} {what}, at most {max(waits):,.2f} s for one: "
            f"{sum(waits) / total:.2%} of {total:,.0f} s. The median step took "
            f"{median(steps):,.3f} s.\n"
        )


def _answers(run: Path, course: Sequence[EvaluationResult], best: int | None) -> Iterator[str]:
    """The best and the last step's answers to the same questions."""
    done = [result for result in course if result.status == "done"]
    shown = {result.step: result for result in done if result.step == best or result is done[-1]}
    by_step = {step: _predictions(run, result) for step, result in shown.items()}
    first = next((predictions for predictions in by_step.values() if predictions), None)
    if first is None:
        return
    yield "## Answers\n"
    for index, question in enumerate(first[:QUESTIONS]):
        yield f"### Question {index + 1}\n"
        yield from _quoted("prompt", _shortened(str(question.get("prompt", "")), end=True))
        yield from _quoted("reference", _shortened(str(question.get("reference", ""))))
        for step, predictions in by_step.items():
            if index < len(predictions) and predictions[index].get("prompt") == question.get("prompt"):
                scores = cast("Mapping[str, float]", predictions[index].get("scores") or {})
                figures = "".join(f", {name} {metric(value)}" for name, value in scores.items())
                name = f"step {step:,}{' (best)' if step == best else ''}{figures}"
                yield from _quoted(name, _shortened(str(predictions[index].get("answer", ""))))


def _predictions(run: Path, result: EvaluationResult) -> list[dict[str, object]]:
    path = run / FOLDER / f"{result.stem}{PREDICTIONS}"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(QUESTIONS), strict=False)]


def _quoted(name: str, text: str) -> Iterator[str]:
    """A block that no text inside can end."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{_cell(name)}:\n\n{fence}text\n{_printable(text.strip())}\n{fence}\n"


def _shortened(text: str, *, end: bool = False) -> str:
    """The beginning of a long text, or its end."""
    if len(text) <= LONGEST:
        return text
    return f"… {text[-LONGEST:]}" if end else f"{text[:LONGEST]} …"


def _cell(text: str) -> str:
    """Any text within a line of Markdown: it cannot start a cell, a line, HTML or a link."""
    return re.sub(r"([\\|`*_\[\]<>])", r"\\\1", _printable(text.replace("\n", " ")))


def _printable(text: str) -> str:
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)
