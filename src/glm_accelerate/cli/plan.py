"""`plan CONFIG`: what follows from a config, the memory and time it takes, and what makes it fit. Nothing is
trained, and no device has to be there.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.plan.ground import Ground
    from glm_accelerate.plan.hardware import Hardware
    from glm_accelerate.plan.layouts import LayoutComparison
    from glm_accelerate.plan.run_plan import RunPlan
    from glm_accelerate.plan.weigh import Duration, Weighed

HELP = (
    "Show what follows from a config, its memory and time on a device, and what to type if it does not fit."
)


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, and the devices that it is planned for."""
    options.config_arguments(parser)
    parser.add_argument(
        "--gpu",
        default="this",
        metavar="NAME",
        help="a device by name, as `RTX 4090`, or its memory, as 12GiB",
    )
    parser.add_argument(
        "--gpus", type=options.at_least(1), default=1, metavar="N", help="how many of them (1)"
    )
    parser.add_argument(
        "--nodes", type=options.at_least(1), default=1, metavar="N", help="in how many machines (1)"
    )
    parser.add_argument(
        "--link", type=options.rate, metavar="R", help="network of each machine, as 400Gbit (100Gbit assumed)"
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    device_arguments(parser)
    parser.add_argument(
        "--tokens-per-second",
        type=options.number(above_zero=True),
        metavar="N",
        help="what `bench step` measured on one device",
    )
    parser.add_argument("--price", type=options.number(), metavar="P", help="price of one device for an hour")
    parser.add_argument("--json", action="store_true", help="as JSON, the way a run directory keeps it")


@dataclass(frozen=True, slots=True)
class Foretold:
    """What follows from a config on the devices that were named."""

    ground: "Ground"
    plan: "RunPlan"
    weighed: "Weighed"
    taken: "Duration"
    layouts: "LayoutComparison | None"


def foretell(args: argparse.Namespace, config: "RunConfig", tokens_per_second: float | None) -> Foretold:
    """Prepares the data if it is not cached."""
    from glm_accelerate.cli.progress import watching
    from glm_accelerate.plan.ground import ground_of
    from glm_accelerate.plan.layouts import cluster_of, compare_layouts
    from glm_accelerate.plan.probe import measured_ground
    from glm_accelerate.plan.resolve import plan_and_weigh
    from glm_accelerate.plan.weigh import duration

    with watching() as watch:
        ground = ground_of(config, _hardware(args), args.gpus, watch)
        ground = measured_ground(config, replace(ground, nodes=args.nodes, network=args.link), watch)
    plan, weighed = plan_and_weigh(config, ground)
    taken = duration(weighed, tokens_per_second)
    several = args.gpus > 1 and ground.hardware.device != "cpu"
    cluster = cluster_of(ground, weighed.speed) if several else None
    layouts = compare_layouts(config, weighed, ground.sizes, cluster) if cluster else None
    if layouts is not None and tokens_per_second is None:
        taken = replace(
            taken, seconds=layouts.own.time.seconds * plan.steps, why="by the step of the layout with a star"
        )
    return Foretold(ground, plan, weighed, taken, layouts)


def run(args: argparse.Namespace) -> int:
    """Resolve and print; 2 where the run does not fit."""
    config = options.config_from(args)  # its mistakes are shown before torch is loaded

    from rich.console import Console

    from glm_accelerate.plan import report
    from glm_accelerate.plan.layout_report import show_layouts
    from glm_accelerate.plan.report import unusual
    from glm_accelerate.plan.weigh import advise

    found = foretell(args, config, args.tokens_per_second)
    ground, weighed, layouts = found.ground, found.weighed, found.layouts
    advice, code = (None, ExitCode.DONE) if weighed.memory.fits else (advise(weighed), ExitCode.USERS_INPUT)
    if args.json:
        fields = asdict(found.plan) | {"time": asdict(found.taken), "advice": advice and asdict(advice)}
        fields |= {"layouts": asdict(layouts)} if layouts else {}
        sys.stdout.write(json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return code
    console = Console()
    report.show_plan(found.plan.reasons, console)
    report.show_memory(weighed.memory, console)
    report.show_duration(found.taken, args.gpus, args.price, console)
    if layouts is not None:
        show_layouts(layouts, console)
    report.show_warnings(unusual(config, ground.sizes, int(ground.inputs.train.lengths.max())), console)
    if advice is not None:
        report.show_advice(advice, _command(args, advice.overrides or ()), console)
    return code


def _hardware(args: argparse.Namespace) -> "Hardware":
    from glm_accelerate.plan.hardware import THIS, as_hardware, detect, find_device

    return detect() if args.gpu == THIS else as_hardware(find_device(args.gpu), args.gpus // args.nodes or 1)


def _command(args: argparse.Namespace, changes: "Sequence[str]") -> list[str]:
    """The typed command as far as the plan depends on it, without what the changes replace."""
    replaced = {word.partition("=")[0] for change in changes for word in change.split()}
    stock = ["--stock-config", *args.stock_config] if args.stock_config else []
    stock += ["--llamafactory-config", args.llamafactory_config] if args.llamafactory_config else []
    config = [
        word for word in (args.config, *args.overrides) if word and word.partition("=")[0] not in replaced
    ]
    device = ["--gpu", args.gpu] if args.gpu != "this" else []
    devices = ["--gpus", str(args.gpus)] if args.gpus > 1 and "--gpus" not in replaced else []
    nodes = ["--nodes", str(args.nodes)] if args.nodes > 1 and devices else []
    return ["plan", *stock, *config, *device, *devices, *nodes]
