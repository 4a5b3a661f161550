"""`compress MODEL NEW`: a smaller base model, to be trained like any other."""

import argparse

from glm_accelerate.cli import options

HELP = (
    "Write a smaller base model: neighbouring layers share projections, large matrices become two thin ones. "
    "It needs training before it is judged."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MODEL", help="a model directory, or a run (its best weights)")
    parser.add_argument("out", metavar="NEW", help="a new directory")
    parser.add_argument(
        "--share-qk",
        type=options.at_least(1),
        default=1,
        metavar="N",
        help="so many neighbouring layers have one query and one key projection (1: each has its own)",
    )
    parser.add_argument(
        "--keep-energy",
        type=options.number(above_zero=True),
        default=1.0,
        metavar="SHARE",
        help="matrices become two thin ones with this share of their squared singular values (1: they stay)",
    )


def run(args: argparse.Namespace) -> int:
    from functools import partial

    from glm_accelerate.cli.chosen import chosen
    from glm_accelerate.export.compress import compress
    from glm_accelerate.export.export import export
    from glm_accelerate.models.shapes import shapes_of
    from glm_accelerate.models.sizes import structure_in_words
    from glm_accelerate.models.weights import read_config
    from glm_accelerate.runtime.env import expanded
    from glm_accelerate.runtime.screen import new_console, say

    result = export(
        chosen(args.path).path,
        expanded(args.out),
        merge_adapter=True,
        layout="structured",
        change=partial(compress, share_qk=args.share_qk, keep_energy=args.keep_energy),
    )
    _, sizes, _ = read_config(result.path)
    weights = f"{shapes_of(sizes).parameters / 1e6:,.4g} M weights"
    say(
        new_console(),
        f"{weights} in {result.path}: {structure_in_words(sizes) or 'no matrix gets smaller by it'}",
    )
    return 0
