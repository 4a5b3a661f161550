"""`bench step|kernels|data|checkpoint CONFIG`: measure a part of training. Nothing is kept but the report."""

import argparse
import re
import sys
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.cli.train import as_rank
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.training.stop import stopping_at_once

if TYPE_CHECKING:
    from glm_accelerate.bench.report import Report
    from glm_accelerate.config.schema import RunConfig

HELP = "Measure the steps, operators, data line or checkpoints of a config on this machine."

KINDS = ("step", "kernels", "data", "checkpoint")
BETWEEN_OVERRIDES = re.compile(r",(?=[a-z_]+\.[a-z_]+=)")  # a value may hold commas itself


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="|".join(KINDS), help="what is measured")
    options.config_arguments(parser)
    for name, least, default, about in (
        ("--steps", 1, 20, "steps that count (20)"),
        ("--warmup", 1, 5, "steps before them (5)"),
        ("--rounds", 3, 3, "repeats of a comparison, a save or an operator, 3 or more (3)"),
    ):
        parser.add_argument(name, type=options.at_least(least), default=default, metavar="N", help=about)
    parser.add_argument(
        "--nproc",
        type=options.at_least(1),
        default=1,
        metavar="N",
        help="step: processes on this machine, one a device, as `train --nproc` starts them (1)",
    )
    parser.add_argument(
        "--compare",
        metavar="CONFIG2|section.key=value,...",
        help="step: measure this beside it, in turn, and show the ratio",
    )
    parser.add_argument(
        "--out", type=options.directory, metavar="DIR", help="write the report there: .md, .json and .svg"
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(args: argparse.Namespace) -> int:
    if args.compare and args.kind != "step":
        raise UserError(f"--compare is for `bench step`, not for `bench {args.kind}`")
    if args.nproc > 1 and (args.kind != "step" or args.compare):
        raise UserError("--nproc is for `bench step` without --compare")
    config = options.config_from(args)  # its mistakes are shown before torch is loaded
    if args.nproc > 1 and launched() is None:
        from glm_accelerate.parallel.launch import launch

        return launch(one_rank, args, args.nproc, lambda: 0, ExitCode.USERS_INPUT)
    other = _other(args.compare, config) if args.compare else None
    with stopping_at_once():
        report = _compared(args, config, other) if other else _measured(args, config)
    if report is None:  # the first rank has it
        return 0

    from rich.console import Console

    from glm_accelerate.bench.report import as_json, show, write

    if args.out:
        write(report, args.out)
    if args.json:
        sys.stdout.write(as_json(report))
    else:
        show(report, Console())
    return 0


def one_rank(args: argparse.Namespace) -> int:
    """`bench step` in a process of its own."""
    return as_rank(lambda: run(args))


def _other(text: str, config: "RunConfig") -> "RunConfig":
    """The second config: a file, a preset, or the first one with other values."""
    from glm_accelerate.config.load import load_config, override

    words = BETWEEN_OVERRIDES.split(text)
    return override(config, words) if "=" in words[0] else load_config(text)


def _measured(args: argparse.Namespace, config: "RunConfig") -> "Report | None":
    from glm_accelerate.cli.progress import counting

    name = options.config_name(args)
    with counting(named=True) as say:
        if args.nproc > 1:
            from glm_accelerate.bench.ranks import measure_ranks, ranks_report

            figures = measure_ranks(config, args.steps, args.warmup, say)
            return None if figures is None else ranks_report(figures, name)
        if args.kind == "step":
            from glm_accelerate.bench.step import measure, step_report

            return step_report(measure(config, args.steps, args.warmup, say), name)
        if args.kind == "kernels":
            from glm_accelerate.bench.kernels import kernels_report, measure_kernels

            return kernels_report(measure_kernels(config, args.rounds, say), name)
        if args.kind == "data":
            from glm_accelerate.bench.data import data_report, measure_data

            return data_report(measure_data(config, args.steps, say), name)
        from glm_accelerate.bench.checkpoint import checkpoint_report, measure_checkpoint

        return checkpoint_report(measure_checkpoint(config, args.rounds, say), name)


def _compared(args: argparse.Namespace, config: "RunConfig", other: "RunConfig") -> "Report":
    from glm_accelerate.bench.compare import Side, compare, compare_report
    from glm_accelerate.cli.progress import counting

    sides = (Side(options.config_name(args), config), Side(args.compare, other))
    words = ("--json", "--steps", str(args.steps), "--warmup", str(args.warmup))
    command = [sys.executable, "-m", "glm_accelerate.cli.main", "bench", "step", *words]
    with counting(named=True) as say:
        return compare_report(sides, compare(sides, args.rounds, command, say))
