"""`evaluate PATH --data FILE`: held-out loss and exact answers of any model, as a table."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import opening
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.data.inputs import Inputs

HELP = "Measure a model on held-out conversations: loss, and greedy answers that are exactly right."

METRICS = ("loss", "exact_match")
SEED = 0


def arguments(parser: argparse.ArgumentParser) -> None:
    """PATH, the data, and what is measured."""
    opening.arguments(parser)
    parser.add_argument("--data", required=True, action="append", metavar="FILE", help="a JSONL file")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=["loss"], help="(loss)")
    for name, least, default, about in (
        ("--samples", 1, None, "a fixed choice of so many (all)"),
        ("--max-tokens", 16, 2048, "longest sample (2048)"),
        ("--max-new-tokens", 1, 256, "longest answer (256)"),
    ):
        parser.add_argument(name, type=opening.at_least(least), default=default, metavar="N", help=about)
    parser.add_argument("--predictions", metavar="FILE", help="write each question with its answer there")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from glm_accelerate.data.order import even_choice
    from glm_accelerate.data.pipeline import batches
    from glm_accelerate.evaluate.score import exact_match, held_out_loss

    if args.predictions and not Path(args.predictions).absolute().parent.is_dir():
        raise UserError("there is no such directory to write in", where=args.predictions)
    if args.predictions and "exact_match" not in args.metrics:
        raise UserError("--predictions needs answers", cure="--metrics loss exact_match")
    opened = opening.open_from(args)
    inputs = _inputs(args, opened.base, opened.template)
    store = inputs.train
    chosen = even_choice(len(store), args.samples or len(store), SEED)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "value", "95 % interval", "samples"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    if "loss" in args.metrics:
        loss = held_out_loss(opened.model, batches(store, chosen, "pack", args.max_tokens))
        between = "" if loss.ci95 is None else f"{loss.ci95[0]:.4f} to {loss.ci95[1]:.4f}"
        table.add_row("loss", f"{loss.mean:.4f}", between, f"{loss.samples:,} of {len(store):,}")
    if "exact_match" in args.metrics:
        samples = [store[number] for number in chosen]
        longest = args.max_new_tokens
        matches = exact_match(
            opened.model, samples, inputs.tokenizer, stops=inputs.stops, max_new_tokens=longest
        )
        between = f"{matches.ci95[0]:.1%} to {matches.ci95[1]:.1%}"
        counted = f"{len(matches.predictions):,} of {len(store):,}"
        table.add_row("exact_match", f"{matches.share:.1%}", between, counted)
        if args.predictions:
            with Path(args.predictions).open("w", encoding="utf-8") as file:
                for prediction in matches.predictions:
                    file.write(json.dumps(asdict(prediction), ensure_ascii=False) + "\n")
    Console().print(table)
    return 0


def _inputs(args: argparse.Namespace, base: Path, template: str) -> "Inputs":
    from glm_accelerate.cli.progress import watching
    from glm_accelerate.config.schema import DataSection
    from glm_accelerate.data.inputs import open_inputs

    section = DataSection.model_validate(
        {
            "train": [{"path": path} for path in args.data],
            "template": template,
            "max_tokens": args.max_tokens,
        }
    )
    with watching() as watch:
        return open_inputs(section, base, watch)
