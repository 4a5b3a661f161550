"""`evaluate PATH`: held-out loss and answers of any model as a table, a run's requests (`--follow`), or all
its evaluations as a page with a picture (`--report`).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.evaluate.protocol.messages import Findings

HELP = "Measure a model on held-out conversations: loss, and its greedy answers, each with an interval."

MEASURING = ("json", "data", "metrics", "samples", "max_tokens", "max_new_tokens", "precision", "predictions")


def arguments(parser: argparse.ArgumentParser) -> None:
    """PATH, what to measure, and where figures go."""
    options.path_arguments(parser)
    parser.add_argument(
        "--data", nargs="+", action="extend", metavar="FILE", help="data files (of a run: its data.dev)"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="loss, exact_match, bleu, rouge, or FILE.py:FUNCTION (of a run: its own; else loss)",
    )
    parser.add_argument(
        "--samples",
        type=_samples,
        metavar="N|all",
        help="a fixed choice of so many (of a run on its own data: as it chooses; else all)",
    )
    for name, least, about in (
        ("--max-tokens", 16, "longest sample of --data (of a run: its own; else 2048)"),
        ("--max-new-tokens", 1, "longest answer (of a run: its own; else 256)"),
        ("--threads", 1, "of the processor (as many as it has cores)"),
    ):
        parser.add_argument(name, type=options.at_least(least), metavar="N", help=about)
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        help="to compute in; in bfloat16 the difference to float32 is measured, too (of a run: its own)",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:1, ... (the first GPU, if there is one)")
    parser.add_argument("--predictions", metavar="FILE", help="write each question with its answer there")
    for name, about in (
        ("--json", "figures for programs, on stdout"),
        ("--report", "of a run: write a page and a picture of all that was found"),
        ("--follow", "of a run: answer its evaluations as they come"),
        ("--trust", "of a run: execute the FILE.py:FUNCTION that its config names"),
        ("--once", "with --follow: what waits now, no more"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    parser.add_argument(
        "--build", metavar="MODULE:FUNCTION", help="with --follow: makes an examiner of your own from RUN"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; or follow a run, or report on it."""
    for option in ("once", "build"):
        if getattr(args, option) and not args.follow:
            raise UserError(f"--{option} is for --follow")
    for verb in ("follow", "report"):  # they do as the run's config says
        given = next((name for name in MEASURING if getattr(args, name)), None)
        if getattr(args, verb) and given is not None:
            raise UserError(f"--{given.replace('_', '-')} is not for --{verb}", cure="leave it out")
    if args.follow:
        return follow(args)
    if args.report:
        from glm_accelerate.evaluate.report.page import report

        sys.stdout.write(f"{report(_run_of(args.path))}\n")
        return 0
    return measure(args)


def follow(args: argparse.Namespace) -> int:
    """Answer requests until the run is finished; 75 after a signal, and what was claimed is free again."""
    from glm_accelerate.training.stop import stopping_at_once

    with stopping_at_once():
        run = Path(args.path) if args.build else _run_of(args.path)
        if not run.is_dir():
            raise UserError("no run: there is no such directory", where=run)
        from glm_accelerate.cli.following import follow_run

        follow_run(run, args)
    return 0


def measure(args: argparse.Namespace) -> int:
    """One evaluation, now."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.text import Text

    from glm_accelerate.cli.chosen import chosen, run_of
    from glm_accelerate.cli.findings import as_json, show
    from glm_accelerate.config.load import load_config
    from glm_accelerate.evaluate.measuring.metrics import metric_names, require_trust

    if args.predictions and not Path(args.predictions).absolute().parent.is_dir():
        raise UserError("there is no such directory to write in", where=args.predictions)
    if args.predictions and Path(args.predictions).is_dir():
        raise UserError("a directory, where a file is to be written", where=args.predictions)
    weights = chosen(args.path)
    run = run_of(weights.path)
    usual = ("loss",) if run is None else load_config(run / "config.yaml").evaluate.metrics
    if run is not None and not (args.metrics or args.trust):
        require_trust(run / "config.yaml", usual)
    answers = metric_names(args.metrics or usual)  # mistakes before the model is read
    if args.predictions and not answers:
        raise UserError("--predictions needs answers", cure="--metrics loss exact_match")
    if not args.data:
        _require_run(args)
    console = Console(soft_wrap=True)
    if weights.message and not args.json:
        console.print(Text(weights.message))
    findings = _measured(args, weights.path, run)
    if args.json:
        sys.stdout.write(f"{as_json(findings, args.path)}\n")
    else:
        show(findings, console)
    if args.predictions:  # last: a full disk costs no figure
        lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in findings.predictions]
        Path(args.predictions).write_text("".join(lines), encoding="utf-8")
    return 0


def _require_run(args: argparse.Namespace) -> None:
    """Without --data the samples are those of a run."""
    from glm_accelerate.models.adapter_files import is_adapter

    path = Path(args.path)
    if not path.is_dir() or (path / "config.json").is_file() or is_adapter(path):
        what = "no run is here, and none of its checkpoints or snapshots"
        raise UserError(what, where=path, cure="any model is measured on --data FILE.jsonl")
    if args.max_tokens is not None:
        raise UserError("--max-tokens is for --data; a run has its own", where=path)


def _measured(args: argparse.Namespace, weights: Path, run: Path | None) -> "Findings":
    from glm_accelerate.cli.progress import counting, watching
    from glm_accelerate.evaluate.measuring.by_hand import EvaluationOptions, evaluate_run, evaluation_of_files

    how = EvaluationOptions(args.metrics, args.samples, args.max_new_tokens, args.precision)
    device, base = options.device_from(args), options.base_from(args)
    if not args.data:
        with counting() as count:
            return evaluate_run(weights, how, device, count, base)
    with watching() as watch:
        evaluate = evaluation_of_files(
            weights, run, args.data, how, device, max_tokens=args.max_tokens, base=base, watch=watch
        )
    with counting() as count:
        return evaluate(count)


def _run_of(path: str) -> Path:
    """A run's directory, also by one of its checkpoints or snapshots."""
    run = Path(path)
    run = run.resolve().parent.parent if (run / "manifest.json").is_file() else run
    if not (run / "config.yaml").is_file():
        raise UserError("no run: there is no config.yaml", where=run)
    return run


def _samples(text: str) -> "int | str":
    return text if text == "all" else options.at_least(1)(text)
