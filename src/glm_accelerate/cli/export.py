"""`export PATH OUT`: a trained model or its adapter as a directory that other programs open."""

import argparse
from pathlib import Path

from glm_accelerate.cli import options
from glm_accelerate.runtime.words import amount

HELP = "Write a trained model for transformers, vLLM and SGLang, or its adapter for PEFT."

DTYPES = ("float32", "bfloat16", "float16")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run (its best weights), a checkpoint or an adapter")
    parser.add_argument("out", metavar="OUT", help="a new directory")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add a LoRA adapter into the model; without it, the adapter alone",
    )
    parser.add_argument(
        "--layout",
        choices=("hf", "original", "structured"),
        default="hf",
        help="hf: what transformers opens by itself; original: ChatGLM's own names, with its code files; "
        "structured: a compressed model as it is, for this program alone (hf)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (as the base model's)")
    options.base(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from glm_accelerate.cli.chosen import chosen
    from glm_accelerate.export.export import export
    from glm_accelerate.runtime.screen import new_console, say

    weights = chosen(args.path)
    result = export(
        weights.path,
        Path(args.out),
        merge_adapter=args.merge,
        layout=args.layout,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        base=options.base_from(args),
    )
    size = sum(path.stat().st_size for path in result.path.iterdir())
    why = f" ({weights.why})" if weights.why else ""
    step = "" if result.step is None else f" of step {result.step:,}{why}"
    console = new_console()
    say(console, (result.kind, "bold"), f"{step} in {result.path}, {amount(size)}")
    for one in weights.passed_over:
        say(console, one, style="yellow")
    if result.kind == "adapter":
        say(console, "It needs its base model beside it; --merge writes one model of both.", style="dim")
    if result.missing:
        missing = ", ".join(result.missing)
        line = f"Its configs name {missing}, which the base model's directory lacks: copy it in."
        say(console, line, style="yellow")
    return 0
