"""`checkpoints RUN`: what is there, whether it is whole, what may go, and how two of them differ."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.checkpoint.overview import Seen

HELP = "List, verify, prune or compare the checkpoints of a run."

ACTIONS = ("list", "verify", "prune", "diff")
WHOLE, DAMAGED = 0, 2
DIFFERENCES_SHOWN = 40


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=options.directory, help="a run's directory; verify: or a checkpoint's"
    )
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="(list)")
    parser.add_argument(
        "which", nargs="*", metavar="STEP", help="verify: only these; diff: two of them, or directories"
    )
    parser.add_argument("--dry-run", action="store_true", help="prune: say what would go, and delete nothing")
    parser.add_argument("--json", action="store_true", help="list and diff: as JSON")


def run(args: argparse.Namespace) -> int:
    from glm_accelerate.checkpoint.find import is_directory
    from glm_accelerate.runtime.screen import new_console

    if args.which and args.action in ("list", "prune"):
        raise UserError(f"{args.action} takes no steps", where=" ".join(args.which))
    if not is_directory(args.run):
        raise UserError("no such directory", where=args.run)
    console = new_console()
    if args.action == "verify":
        return verify(args.run, args.which, console)
    if args.action == "prune":
        return prune(args.run, args.dry_run, console)
    if args.action == "diff":
        return diff(args.run, args.which, args.json, console)
    return show(args.run, args.json, console)


def show(run: Path, as_json: bool, console: "Console") -> int:
    """A line for each, newest first. Cheap: files are looked at, not read."""
    from rich.text import Text

    from glm_accelerate.checkpoint.find import candidates
    from glm_accelerate.checkpoint.overview import overview
    from glm_accelerate.evaluate.protocol.history import main_results
    from glm_accelerate.evaluate.protocol.ledger import results
    from glm_accelerate.runtime.screen import new_table, say

    measured = main_results(results(run))
    seen = overview(run, {one.step: one.loss for one in measured if one.loss is not None})
    if as_json:
        console.file.write(json.dumps([asdict(one) for one in seen], indent=2, allow_nan=False) + "\n")
        return WHOLE
    table = new_table("step", "size", "age", "held out", "ranks", "codec", "state", "", right=5)
    for one in seen:
        table.add_row(*map(Text, _cells(one)))
    console.print(table if seen else "no checkpoint here")
    for reason in candidates(run).reasons:
        say(console, reason, style="yellow")
    return WHOLE


def _cells(one: "Seen") -> tuple[str, ...]:
    """A line of the list."""
    if one.bytes is None or one.written is None:
        return (f"{one.step:,}", "", "", "", "", "", f"damaged: {one.damage}", "")
    marks = {
        "best": one.best,
        "snapshot": one.kind == "snapshot",
        "leased": one.leased,
        "not finite": one.nonfinite,
        f"suspect: the loss jumped at step {one.suspect}": one.suspect is not None,
    }
    return (
        f"{one.step:,}",
        amount(one.bytes),
        str(timedelta(seconds=max(0, round(time.time() - one.written)))),
        "" if one.loss is None else f"{one.loss:.4f}",
        str(one.ranks),
        one.codec or "",
        "whole by size",
        ", ".join(name for name, is_so in marks.items() if is_so),
    )


def verify(run: Path, which: Sequence[str], console: "Console") -> int:
    """Reads every byte, and names every file that is not as it was written."""
    from glm_accelerate.checkpoint.audit import audit
    from glm_accelerate.checkpoint.find import candidates, published
    from glm_accelerate.checkpoint.format import MANIFEST
    from glm_accelerate.runtime.screen import say

    if (run / MANIFEST).exists() and not which:
        paths = [run]
    else:
        paths = [_named(run, word) for word in which] if which else published(run)
    if not paths:
        raise UserError("; ".join(["no checkpoint here", *candidates(run).reasons]), where=run)
    code = WHOLE
    for path in paths:
        result = audit(path)
        code = DAMAGED if result.damaged else code
        say(console, ("damaged", "bold red") if result.damaged else ("whole", "green"), f"  {path}")
        for damage in result.damaged:
            say(console, f"  {damage}", style="red")
        if result.strange:
            say(console, f"  does not belong to it: {', '.join(result.strange)}", style="yellow")
    return code


def diff(run: Path, which: Sequence[str], as_json: bool, console: "Console") -> int:
    """What differs between two, and nothing else."""
    from rich.text import Text

    from glm_accelerate.checkpoint.audit import compare
    from glm_accelerate.runtime.screen import new_table

    if len(which) != 2:
        raise UserError("diff compares two checkpoints", cure="checkpoints RUN diff 100 200")
    differences = list(compare(*(_named(run, word) for word in which)))
    if as_json:
        console.file.write(json.dumps([asdict(one) for one in differences], indent=2) + "\n")
        return WHOLE
    table = new_table("what", "name", *which, "max |difference|")
    for one in differences[:DIFFERENCES_SHOWN]:
        most = "" if one.most is None else f"{one.most:.3g}"
        table.add_row(*map(Text, (one.kind, one.name, one.first, one.second, most)))
    console.print(table if differences else "no difference")
    if len(differences) > DIFFERENCES_SHOWN:
        console.print(f"and {len(differences) - DIFFERENCES_SHOWN:,} more: --json lists all")
    return WHOLE


def _named(run: Path, word: str) -> Path:
    """A checkpoint of the run by its step, or any by its directory."""
    from glm_accelerate.checkpoint.find import is_directory
    from glm_accelerate.checkpoint.format import FOLDER, step_of

    path = run / FOLDER / f"checkpoint-{word}" if step_of(f"checkpoint-{word}") is not None else Path(word)
    if not is_directory(path):
        raise UserError("no such checkpoint", where=path)
    return path


def prune(run: Path, dry: bool, console: "Console") -> int:
    """Deletes what the run's own policy would, as the trainer does."""
    from glm_accelerate.checkpoint.overview import overview
    from glm_accelerate.checkpoint.retain import choose_stale, delete, present
    from glm_accelerate.config.load import load_config
    from glm_accelerate.evaluate.protocol.history import best_step, main_results, scored_steps
    from glm_accelerate.evaluate.protocol.ledger import listing
    from glm_accelerate.runtime.screen import say

    if not (run / "config.yaml").is_file():
        raise UserError("no config.yaml says what should stay", where=run, cure="name a run's directory")
    identity = run / "run_id"
    evaluations = listing(run)
    levels = scored_steps(main_results(evaluations.results)) or overview(run)
    entries = present(
        run,
        run_id=identity.read_text("ascii", "replace").strip() if identity.is_file() else None,
        losses={one.step: one.loss for one in levels if one.loss is not None},
        best=best_step(run),
        pending=[request.step for request in evaluations.waiting],
        jumped=_jumped(run),
    )
    stale = choose_stale(entries, load_config(run / "config.yaml").checkpoint, time.time())
    steps = [entry.step for entry in stale]
    if not dry:
        gone = delete(run, stale)
        steps = list(gone.deleted)
        for step, why in gone.failed.items():
            say(console, f"step {step} could not be deleted: {why}", style="red")
    listed = ", ".join(f"{step:,}" for step in steps) or "nothing"
    console.print(f"{'would go' if dry else 'deleted'}: {listed}; {len(entries) - len(steps)} stay")
    return WHOLE


def _jumped(run: Path) -> int | None:
    """The step since which the training loss is too high, as the trainer follows it."""
    from glm_accelerate.observe.events import read_events
    from glm_accelerate.observe.figures import number
    from glm_accelerate.training.spike import Level, follow

    level = Level()
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "step" and event.get("applied") and isinstance(loss := event.get("loss"), float):
            level = follow(level, int(number(event, "step")), loss)
    return level.jumped
