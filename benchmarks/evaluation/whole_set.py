"""Evaluating a whole set by its answers, ours against the stock way: the time for the same figures.

python -m benchmarks.evaluation.whole_set --data TRAIN.jsonl DEV.jsonl --out benchmarks/results

Both sides are fresh processes that take turns, on the same model, questions and threads. Without --model it
makes one: the race's, trained for some steps, so that it ends its answers.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.child import result, run
from benchmarks.evaluation.job import Job, Result, result_of
from benchmarks.evaluation.prompts import LONGEST
from benchmarks.evaluation.stock_evaluation import written
from benchmarks.evaluation.stock_metrics import NAMES, means, scores_of
from benchmarks.report import Origin, number, origin, page, publish, spread, table
from glm_accelerate.evaluate.measuring.text import text_scores, word_cutter

ABOUT = """\
**Stock** (`stock_evaluation.py`): our own re-statement of GLM-4's fine-tune script on the HF Trainer: greedy
`generate` with its cache, batches padded on the left, then BLEU-4 and ROUGE by jieba, nltk and rouge_chinese
on the rank. **Ours** (`our_evaluation.py`): what `evaluate PATH --metrics bleu rouge` does. Loading the model
is in the last row alone; stock's dictionary is loaded beforehand, ours anew in each evaluation, beside
generation. The script's `combine: false` asks for every answer of a conversation; here both sides are asked
for the last one. Ratios are taken between neighbours in time, then the median.
"""


@dataclass(frozen=True)
class Round:
    """One turn of every side: stock at each batch size, then ours."""

    stock: dict[int, Result]
    ours: Result


def side(module: str, job: Job, work: Path) -> Result:
    return result(f"benchmarks.evaluation.{module}", job, result_of, work, threads=job.threads)


def make_model(train: Path, work: Path, steps: int, tiny: bool, threads: int) -> Path:
    """The race's model, after some steps of full fine-tuning."""
    start, run_dir, out = work / "start", work / "run", work / "model"
    if out.exists():
        return out
    words = ("--data", train, "--out", start, *(("--tiny",) if tiny else ()))
    run("benchmarks.race.prepare_model", *words, threads=threads)
    config = {
        "model": {"path": str(start)},
        "adapt": {"method": "full"},
        "data": {"train": str(train), "max_tokens": 1024, "cache": str(work / "cache")},
        "train": {"steps": steps, "step_samples": 16},
        "optim": {"learning_rate": 1e-3},
        "checkpoint": {"every": steps},
    }
    (work / "config.yaml").write_text(json.dumps(config))  # which is YAML, too
    verb = "glm_accelerate.cli.main"
    run(verb, "train", work / "config.yaml", "--run", run_dir, threads=threads)
    run(verb, "export", run_dir, out, "--dtype", "bfloat16", threads=threads)
    for name in ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (start / name).exists() and not (out / name).exists():
            (out / name).write_bytes((start / name).read_bytes())
    return out


def write_set(dev: Path, model: Path, out: Path, count: int) -> int:
    """The first conversations that end with an answer, and that stock neither cuts nor writes otherwise than
    the model's chat template: so both sides are asked the same."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    kept: list[str] = []
    for line in dev.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        if len(kept) == count or len(messages) < 2 or messages[-1]["role"] != "assistant":
            continue
        asked = [*written(tokenizer, messages[:-1]), assistant]
        apart = [token for message in messages[:-1] for token in written(tokenizer, [message])[2:]]
        answer = written(tokenizer, messages[-1:])[3:]
        if asked[2:-1] == apart and len(asked) <= LONGEST and 1 < len(answer) < LONGEST:
            kept.append(line)
    out.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return len(kept)


def checks(stock: Result, ours: Result, shipped: Result) -> tuple[list[str], dict[str, Any]]:
    """What is said about the figures, and the differences behind it."""
    cut = word_cutter()
    texts = [*stock.answers, *shipped.answers]
    apart = max(
        abs(text_scores(NAMES, text.right, text.said, cut)[name] - text.scores[name])
        for text in texts
        for name in NAMES
    )
    scored = [answer for answer in ours.answers if answer.answer and answer.reference]  # others raise there
    back = max(
        abs(scores_of(answer.reference, answer.answer)[name] - answer.scores[name])
        for answer in scored
        for name in NAMES
    )
    theirs = {answer.prompt: answer for answer in stock.answers}
    same = sum(theirs[one.prompt].answer == one.answer for one in ours.answers if one.prompt in theirs)
    asked = len(ours.answers)
    differences = {
        "stock texts by ours": apart,
        "our texts by stock's packages": back,
        "same": same,
        "asked": asked,
    }
    assert {answer.prompt for answer in ours.answers} == set(theirs), "the sides were asked different things"
    lines = [
        f"- {len(texts)} texts of the stock way scored by our metrics: at most {apart:.1e} from its own",
        f"- {len(scored)} texts of ours scored by the stock way's packages: at most {back:.1e} from ours",
        f"- both sides were asked the same {asked} questions, and gave the same answer to {same}",
        f"- prompts that hold the reference: {shipped.shown} of {len(shipped.answers)} as shipped, "
        f"{stock.shown} with `combine: false`, {ours.shown} of ours",
    ]
    return lines, differences


TIMES = {
    "whole": "seconds that training would wait",
    "generation": "of those, generation",
    "metrics": "of those, metrics after it",
    "tokens": "tokens generated",
    "process": "seconds of the process, loading included",
}


def times(rounds: Sequence[Round]) -> str:
    batches = list(rounds[0].stock)

    def cells(name: str) -> Sequence[str]:
        stock = [[float(getattr(turn.stock[batch], name)) for turn in rounds] for batch in batches]
        ours = [float(getattr(turn.ours, name)) for turn in rounds]
        ratios = [[a / b for a, b in zip(one, ours, strict=True) if b] for one in stock]
        medians = (number(median(one)) for one in [*stock, ours])
        return TIMES[name], *medians, *(spread(one) if one else "" for one in ratios)

    heads = [*(f"stock, batch {batch}" for batch in batches), "ours", *(f"ratio to {b}" for b in batches)]
    return table(("", *heads), map(cells, TIMES))


def scores(stock: Result, ours: Result, shipped: Result) -> str:
    """The figures, and what padding and special tokens add to them in the stock way."""
    bare = means(
        scores_of(text.reference, text.answer)
        if text.answer and text.reference
        else dict.fromkeys(NAMES, 0.0)
        for text in stock.answers
    )
    rows = {
        "ours": ours.figures,
        "stock's answers without stop token and padding": bare,
        "stock, as it scores them": stock.figures,
        "stock as shipped, the answer in the prompt": shipped.figures,
    }
    return table(
        ("", *NAMES), ((way, *(f"{each[name]:.4f}" for name in NAMES)) for way, each in rows.items())
    )


def markdown(source: Origin, job: Job, asked: int, rounds: Sequence[Round], shipped: Result) -> str:
    last = rounds[-1]
    stock = last.stock[min(last.stock)]
    setting = (
        f"{asked} questions, at most {job.max_new_tokens} new tokens, {job.dtype}, {job.device}, "
        f"{job.threads} threads, {len(rounds)} rounds"
    )
    tables = times(rounds), "", scores(stock, last.ours, shipped), "", *checks(stock, last.ours, shipped)[0]
    return page("A whole set evaluated by its answers", source, [setting], ABOUT, *tables)


def measure(given: argparse.Namespace, work: Path) -> None:
    train, dev = (path.resolve() for path in given.data)
    model = (
        given.model.resolve()
        if given.model
        else make_model(train, work, given.steps, given.tiny, given.threads)
    )
    asked = write_set(dev, model, work / "set.jsonl", given.samples)
    job = Job(
        model=str(model),
        data=str(work / "set.jsonl"),
        cache=str(work / "cache"),
        batch=min(given.batch),
        max_new_tokens=given.max_new_tokens,
        threads=given.threads,
        dtype=given.dtype,
        device=given.device,
    )
    shipped = side("stock_evaluation", replace(job, prompts="shipped"), work)
    rounds: list[Round] = []
    for turn in range(given.repeats):
        stock = {batch: side("stock_evaluation", replace(job, batch=batch), work) for batch in given.batch}
        rounds.append(Round(stock, side("our_evaluation", job, work)))
        waited = {batch: round(one.whole, 1) for batch, one in stock.items()}
        print(f"round {turn + 1}: stock {waited}, ours {rounds[-1].ours.whole:.1f} s", file=sys.stderr)
    source = origin(["python", "-m", "benchmarks.evaluation.whole_set", *sys.argv[1:]], shipped.versions)
    text = markdown(source, job, asked, rounds, shipped)
    differences = checks(rounds[-1].stock[min(given.batch)], rounds[-1].ours, shipped)[1]
    figures = {"checks": differences, "shipped": asdict(shipped), "rounds": [asdict(turn) for turn in rounds]}
    publish(given.out, f"evaluation-whole-set-{given.device}", source, text, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluating a whole set, ours against the stock way.")
    parser.add_argument("--data", type=Path, nargs=2, required=True, metavar=("TRAIN", "DEV"))
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (else one is made and trained)")
    parser.add_argument("--steps", type=int, default=300, help="that the made model is trained")
    parser.add_argument("--tiny", action="store_true", help="a made model for tests")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16], help="of the stock way")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, help="keep the model here for the next time")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args()
    if given.work is not None:
        given.work.mkdir(parents=True, exist_ok=True)
        return measure(given, given.work.resolve())
    with tempfile.TemporaryDirectory(prefix="whole-set-") as work:
        measure(given, Path(work))


if __name__ == "__main__":
    main()
