"""`plan CONFIG`: every value that follows from a config on this machine, and why. Nothing is trained."""

import argparse
import json
import sys
from dataclasses import asdict

from glm_accelerate.cli import source

HELP = "Show every value that follows from a config on this machine, with its reason."


def arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, and the form of the answer."""
    source.arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, the way a run directory keeps it")


def run(args: argparse.Namespace) -> int:
    """Resolve and print."""
    config = source.config_from(args)  # its mistakes are shown before torch is loaded

    from rich.console import Console

    from glm_accelerate.plan.report import show_plan
    from glm_accelerate.plan.resolve import plan_for

    plan = plan_for(config)
    if args.json:
        sys.stdout.write(json.dumps(asdict(plan), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        show_plan(plan, Console())
    return 0
