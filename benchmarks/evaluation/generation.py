"""Answers to a held-out set: ours against `generate` of transformers as the stock script calls it.

python -m benchmarks.evaluation.generation [--data FILE.jsonl] [--quick] [--out benchmarks/results]

First the same answers, token for token, in float32; then, in bfloat16, prefill and decode apart: every answer
as long as allowed, and every answer as long as its reference, with the same stop schedule on both sides.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import result
from benchmarks.evaluation.generation_sides import Done, Job
from benchmarks.memory.flat import draw_conversations
from benchmarks.race.prepare_model import SMALL, TINY, WORDS, prepare_model
from benchmarks.report import Origin, number, origin, page, publish, spread, table
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.evaluate.measuring.losses import split

ABOUT = """\
**theirs**: `generate` of transformers with its cache, greedy, bfloat16 as the stock script loads it, batches
of so many prompts in the order of the file, padded on the left to their longest, each until its last row has
stopped. **ours**: all prompts at once, greedy, bfloat16; rows that have stopped are replaced. **prefill** is
theirs with one new token, ours the passes that read prompts; **decode** is the rest. **early**: an answer
ends after as many tokens as its reference has, by the same schedule on both sides (a LogitsProcessor there,
the function that looks for stop tokens here), which neither side knows beforehand. Every run is a fresh
process, warmed on a first batch; sides take turns, figures are medians, a ratio is taken between neighbours.
"""


PARTS = ("prefill", "decode", "whole")


@dataclass(frozen=True)
class Set:
    """What is asked, and how long the right answers are."""

    prompts: list[list[int]]
    lengths: list[int]
    stops: list[int]


@dataclass(frozen=True)
class Case:
    """One line of the report. `batch` is theirs."""

    name: str
    batch: int
    new: int
    early: bool


@dataclass(frozen=True)
class Row:
    """One case's runs, ours and theirs in turn."""

    case: Case
    ours: list[Done]
    theirs: list[Done]
    equal: int  # answers that are the same to the last token

    def ratios(self, part: str) -> list[float]:
        return [getattr(b, part) / getattr(a, part) for a, b in zip(self.ours, self.theirs, strict=True)]


def asked(data: Path, model: Path, work: Path, count: int, most: int) -> Set:
    section = {"train": str(data), "dev": str(data), "max_tokens": most, "overlong": "drop"}
    config = RunConfig.model_validate(
        {"model": {"path": str(model)}, "data": {**section, "cache": str(work)}}
    )
    inputs = open_inputs(config.data, model)
    assert inputs.dev is not None
    stops = sorted(inputs.stops)
    cases = (split(inputs.dev[n], inputs.stops) for n in range(len(inputs.dev)))
    pairs = [case for case in cases if case is not None]
    chosen = random.Random(0).sample(pairs, min(count, len(pairs)))
    return Set([prompt for prompt, _ in chosen], [len(reference) for _, reference in chosen], stops)


def run(job: Job, work: Path) -> Done:
    return result("benchmarks.evaluation.generation_sides", job, Done, work, threads=job.threads)


def equal_in_float32(job: Job, lengths: Sequence[int], work: Path) -> tuple[int, int]:
    """How many answers are the same to the last token, of how many: as long as allowed, then with stops."""
    same = 0
    for ends in (None, [min(n, job.new) for n in lengths]):
        ours = replace(job, lengths=ends, warm=False)
        sides = run(ours, work), run(replace(ours, side="theirs", batch=4), work)
        same += sum(a == b for a, b in zip(sides[0].answers, sides[1].answers, strict=True))
    return same, 2 * len(job.prompts)


def compare(base: Job, questions: Set, case: Case, repeats: int, work: Path) -> Row:
    lengths = [min(n, case.new) for n in questions.lengths] if case.early else None
    mine = replace(base, new=case.new, lengths=lengths)
    stock = replace(mine, side="theirs", batch=case.batch)
    pairs: list[tuple[Done, Done]] = []
    for _ in range(repeats):
        b = run(stock, work)
        pairs.append((run(mine, work), b))
        seconds = f"{b.whole:.1f} s theirs, {pairs[-1][0].whole:.1f} s ours"
        print(f"  {case.name}: {seconds}", file=sys.stderr, flush=True)
    ours, theirs = pairs[0][0].answers, pairs[0][1].answers
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return Row(case, [a for a, _ in pairs], [b for _, b in pairs], equal)


# --- The report. ---


def rows_of(row: Row) -> Iterator[Sequence[str]]:
    for side, runs in (("theirs", row.theirs), ("ours", row.ours)):
        parts = [statistics.median(getattr(run, part) for run in runs) for part in PARTS]
        cells = [row.case.name if side == "theirs" else "", side, *map(number, parts)]
        cells.append(number(runs[0].tokens / parts[2]))
        ratios = [spread(row.ratios(part)) for part in PARTS] if side == "ours" else [""] * len(PARTS)
        yield *cells, *ratios


def markdown(source: Origin, base: Job, questions: Set, same: int, of: int, rows: Sequence[Row]) -> str:
    lengths, answers = ([len(p) for p in questions.prompts], questions.lengths)
    setting = (
        f"{base.device}, {base.threads} threads; {len(lengths)} prompts of {sum(lengths):,} tokens (median "
        f"{statistics.median(lengths):.0f}, longest {max(lengths)}), references of {sum(answers):,} (median "
        f"{statistics.median(answers):.0f}, longest {max(answers)})"
    )
    columns = "prefill s, decode s, whole s, answer tokens/s, theirs / ours: prefill, decode, whole"
    equal = ", ".join(f"{row.case.name}: {row.equal} of {len(lengths)} the same" for row in rows)
    return page(
        "Answers to a held-out set: ours against transformers' `generate`",
        source,
        [setting],
        ABOUT,
        f"**In float32, {same} of {of} answers are the same, token for token.**\n",
        table(("case", "", *columns.split(", ")), (line for row in rows for line in rows_of(row)), (0, 1)),
        f"\nIn bfloat16: {equal}.",
    )


def cases(given: argparse.Namespace) -> list[Case]:
    early = [Case(f"early, batch {b}, at most {given.new[-1]}", b, given.new[-1], True) for b in given.batch]
    full = [Case(f"all {new} tokens, batch {b}", b, new, False) for new in given.new for b in given.batch]
    return [*early, *full]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generation, ours against transformers'.")
    parser.add_argument("--data", type=Path, help="JSONL of conversations; else they are made up")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; else the race's random model")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16], help="theirs")
    parser.add_argument("--ours-batch", type=int, help="rows at most on our side; else by memory")
    parser.add_argument("--new", type=int, nargs="+", default=[128, 512], help="tokens at most")
    parser.add_argument("--longest", type=int, default=1536, help="longer conversations are left out")
    parser.add_argument("--equal", type=int, default=32, help="prompts that are compared in float32")
    parser.add_argument("--vocab", type=int, default=WORDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a tiny model and few prompts: a trial")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.samples, given.new, given.repeats, given.equal = 24, [32], 1, 8
    return given


def main() -> None:
    given = parsed()
    import transformers

    source = origin(
        ["python", "-m", "benchmarks.evaluation.generation", *sys.argv[1:]],
        {"torch": torch.__version__, "transformers": transformers.__version__},
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = given.data or work / "made-up.jsonl"
        if given.data is None:
            draw_conversations(data, max(400, given.samples), 100, seed=0)
        model = given.model or work / "model"
        if given.model is None:
            prepare_model(data, model, given.vocab, shape=TINY if given.quick else SMALL)
        questions = asked(data, model, work / "cache", given.samples, given.longest)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shared: dict[str, Any] = {"model": str(model), "stops": questions.stops, "device": device}
        base = Job(
            side="ours",
            prompts=questions.prompts,
            lengths=None,
            batch=given.ours_batch,
            new=0,
            dtype="bfloat16",
            threads=given.threads,
            **shared,
        )
        few = replace(
            base, prompts=questions.prompts[: given.equal], new=min(128, given.new[0]), dtype="float32"
        )
        same, of = equal_in_float32(few, questions.lengths[: given.equal], work)
        print(f"  float32: {same} of {of} the same", file=sys.stderr, flush=True)
        rows = [compare(base, questions, case, given.repeats, work) for case in cases(given)]
    text = markdown(source, base, questions, same, of, rows)
    figures = {"same": same, "of": of, "rows": [record(row) for row in rows]}
    publish(given.out, "evaluation-generation", source, text, figures)


def record(row: Row) -> dict[str, Any]:
    """For the JSON file: without the answers themselves."""
    runs = {
        side: [{"whole": run.whole, "prefill": run.prefill, "tokens": run.tokens} for run in runs]
        for side, runs in (("ours", row.ours), ("theirs", row.theirs))
    }
    return {"case": asdict(row.case), **runs, "equal": row.equal}


if __name__ == "__main__":
    main()
