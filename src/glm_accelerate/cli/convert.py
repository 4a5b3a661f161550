"""`convert DIR OUT`: old pickled weights of ChatGLM2 and ChatGLM3 to safetensors."""

import argparse

HELP = "Turn pytorch_model*.bin into safetensors. Files that hold anything but tensors are refused."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", help="a model directory with pytorch_model*.bin")
    parser.add_argument("out", metavar="OUT", help="a new directory")


def run(args: argparse.Namespace) -> int:
    from glm_accelerate.cli.progress import watching
    from glm_accelerate.export.convert import convert
    from glm_accelerate.runtime.env import expanded
    from glm_accelerate.runtime.screen import new_console, say
    from glm_accelerate.runtime.words import amount

    with watching() as watch:
        result = convert(
            expanded(args.source), expanded(args.out), lambda done, total: watch("weights", done, total)
        )
    say(new_console(), f"{result.tensors:,} tensors in {result.path}, {amount(result.bytes)}")
    return 0
