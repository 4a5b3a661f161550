"""`evaluate RUN --follow`: an evaluator that a person starts, on this machine or another."""

import argparse
from pathlib import Path

from rich.console import Console

from glm_accelerate.cli import options
from glm_accelerate.evaluate.measuring.metrics import require_trust
from glm_accelerate.evaluate.measuring.rebuild import config_and_plan, glm_examiner
from glm_accelerate.evaluate.measuring.serve import build_examiner
from glm_accelerate.evaluate.protocol.evaluator import (
    FollowOptions,
    RanksOutOfStep,
    evaluates_all,
    finished,
    follow,
    ignore,
)
from glm_accelerate.evaluate.protocol.ledger import read, waiting
from glm_accelerate.evaluate.protocol.messages import parse_stem
from glm_accelerate.observe.events import read_events
from glm_accelerate.observe.figures import evaluation
from glm_accelerate.parallel.ranks import joined
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.screen import say


def follow_run(run: Path, args: argparse.Namespace) -> None:
    """Evaluate its requests until the run is finished, and report each on stderr."""
    console, results = Console(stderr=True), set[int]()

    def report(line: str) -> None:
        word, _, stem = line.partition(" ")
        result, parsed = read(run, stem), parse_stem(stem)
        if word == "claimed" and parsed is not None:
            say(console, f"step {parsed[0]:,}: evaluating")
        elif result is not None:
            results.add(result.step)
            say(console, evaluation(result.event(), whole=result.exam_id != examiner.exam_id))

    if not (args.trust or args.build):
        require_trust(run / "config.yaml", config_and_plan(run)[0].evaluate.metrics)
    with joined() as ranks:
        device = options.device_from(args)
        if args.build:
            examiner = build_examiner(args.build, str(run))
        else:
            examiner = glm_examiner(run, device, ranks, options.base_from(args))
        if ranks.first:
            say(console, f"following {run} on {device}: {len(waiting(run)):,} evaluations wait")
        on_message = report if ranks.first else ignore
        how = FollowOptions(args.once, evaluates_all(run), strict=True, on_message=on_message)
        try:
            follow(run, examiner, how, ranks)
        except RanksOutOfStep as error:
            raise UserError(f"this evaluator can answer no more: {error}", cure="start it again") from error
        if ranks.first:
            say(console, "all is answered" if args.once else "the run is finished, and all is answered")
            taken_over = {event.get("step") for event in read_events(run / "evals.jsonl")}
            if finished(run) and not results <= taken_over:
                say(console, "run the same train again to take these results over (it names the best)")
