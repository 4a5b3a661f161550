"""`data CONFIG`: what training will see. Counts, lengths, what each way of batching wastes, what is left out
and why, what train and dev share, and one sample as the model reads it, its targets marked.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from glm_accelerate.data.store import Store
    from glm_accelerate.data.tokenizers import Tokenizer
    from glm_accelerate.data.types import Sample
    from glm_accelerate.plan.run_plan import RunPlan

HELP = "Show the data as training sees it: lengths, padding waste, what is left out and why, one sample."

BAR_WIDTH = 40
LEARNT = "bold green"
# Control characters, but for line end and tab, and what is shown in their place.
PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # terminals take U+009B for an escape
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.config_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", type=int, default=0, metavar="N", help="show training sample N (0)")
    which.add_argument("--line", metavar="[FILE:]N", help="show the sample of line N of a training file")


def run(args: argparse.Namespace) -> int:
    """Prepare what is not cached, and print."""
    from glm_accelerate.cli.progress import watching
    from glm_accelerate.data.inputs import open_inputs
    from glm_accelerate.models.locate import locate
    from glm_accelerate.models.weights import read_config
    from glm_accelerate.plan.ground import Ground
    from glm_accelerate.plan.hardware import detect
    from glm_accelerate.plan.resolve import resolve
    from glm_accelerate.runtime.screen import new_console, say

    config = options.config_from(args)
    directory = locate(config.model.path)
    family, sizes, _ = read_config(directory)
    with watching() as watch:
        inputs = open_inputs(config.data, directory, watch)
    plan = resolve(config, Ground(family, sizes, inputs, detect()))
    number = find_line(inputs.train, args.line) if args.line else args.sample
    if not 0 <= number < len(inputs.train):
        last = len(inputs.train) - 1
        raise UserError(f"there is no training sample {number}", where="--sample", cure=f"0 to {last}")
    console = new_console()
    for line in inputs.damages:
        say(console, line)
    if inputs.dev and inputs.held_out:
        say(console, ("held out", "bold"), f"  {len(inputs.dev):,} samples: {inputs.held_out}")
    stores = {"train": inputs.train} | ({"dev": inputs.dev} if inputs.dev else {})
    for name, store in stores.items():
        show_counts(console, name, store)
    show_lengths(console, inputs.train)
    show_batching(console, inputs.train, plan, config.data.batching)
    for name, store in stores.items():
        show_left_out(console, name, store)
    if inputs.dev and not inputs.held_out:
        show_shared(console, inputs.train, inputs.dev)
    show_sample(console, number, inputs.train[number], inputs.tokenizer)
    return 0


def find_line(store: "Store", wanted: str) -> int:
    """The number of the first sample that came from [FILE:]N; without FILE, from the first file."""
    name, _, number = wanted.rpartition(":")
    if not number.isdecimal():
        raise UserError(
            f"`{wanted}` is not a line", where="--line", cure="--line 12, or --line talk.jsonl:12"
        )
    parts = [part for part in store.parts if not name or part.path == Path(name) or part.path.name == name]
    if not parts:
        files = ", ".join(part.path.name for part in store.parts)
        raise UserError(f"`{name}` is not a training file", where="--line", cure=f"one of {files}")
    samples = (parts[0].places == int(number)).nonzero()[0]
    if not len(samples):
        place = f"{parts[0].path}:{number}"
        raise UserError(
            "no sample came from this line", where=place, cure="what is left out is listed without --line"
        )
    before = store.parts.index(parts[0])
    return store.spans[before].start + int(samples[0])


def show_counts(console: "Console", name: str, store: "Store") -> None:
    """Two lines a file."""
    from glm_accelerate.runtime.screen import say

    for part in store.parts:
        report = part.report
        weight = f", weight {part.weight:g}" if part.weight != 1 else ""
        say(console, (name, "bold"), f"  {part.path}{weight}")
        counts = f"{report.samples:,} samples, {report.tokens:,} tokens, {report.targets:,} of them learnt"
        left = f"{report.truncated:,} truncated, {sum(report.dropped.values()):,} left out"
        say(console, f"  {counts}; {left}, {report.bad:,} lines unreadable")


def show_lengths(console: "Console", store: "Store") -> None:
    """Percentiles and a histogram."""
    from glm_accelerate.data.measure import histogram, percentiles
    from glm_accelerate.runtime.screen import say

    shares = ", ".join(f"{percent} % <= {length:,}" for percent, length in percentiles(store.lengths))
    say(console, ("\nTokens in a training sample", "bold"), f"  {shares}")
    bars = histogram(store.lengths)
    most = max(bar.samples for bar in bars)
    width = len(f"{bars[-1].last:,}")
    for bar in bars:
        lengths = f"{bar.first:>{width},} - {bar.last:>{width},}"
        say(console, f"{lengths} {_bar(bar.samples / most)} {bar.samples:,}")


def show_batching(console: "Console", store: "Store", plan: "RunPlan", batching: str) -> None:
    """How much of what would be computed is tokens, in steps and passes as the plan has them."""
    from glm_accelerate.data.measure import useful_shares
    from glm_accelerate.runtime.screen import say

    step = plan.step_samples or max(1, round((plan.step_tokens or 0) / float(store.lengths.mean())))
    about = f"  steps of {step} samples; a bucket's width is a multiple of 64 or more, so that shapes are few"
    say(console, ("\nUseful share of what is computed", "bold"), about)
    for useful in useful_shares(store.lengths, step, plan.micro_tokens):
        chosen = " <- this config" if useful.way.partition(",")[0] == batching else ""
        shares = f"{useful.share:.0%}, {1 - useful.share:.0%} wasted"
        say(console, f"{useful.way:<13} {_bar(useful.share)} {shares}{chosen}")


def show_left_out(console: "Console", name: str, store: "Store") -> None:
    """Each reason with its count and the first few lines with it."""
    from glm_accelerate.runtime.screen import say

    report = store.report
    counts = {**report.dropped, "truncated": report.truncated, "unreadable": report.bad}
    for kind, count in counts.items():
        if not count:
            continue
        length = (
            f"; data.max_tokens={report.longest} loses nothing" if kind in ("truncated", "too long") else ""
        )
        say(console, f"\n{name}: {count:,} {kind}{length}", style="bold yellow")
        for remark in report.remarks:
            reason, _, more = remark.reason.partition(": ")
            if reason == kind:
                say(console, f"  {remark.place} {visible(more)}".rstrip())


def show_shared(console: "Console", train: "Store", dev: "Store") -> None:
    """Held-out samples that training sees say nothing about generalisation."""
    from glm_accelerate.data.measure import shared
    from glm_accelerate.runtime.screen import say

    pairs = shared(train, dev)
    if not pairs:
        say(console, "\nNo dev sample is also a training sample.", style="green")
        return
    head = f"\n{len(pairs):,} of {len(dev):,} dev samples are also training samples: their loss flatters"
    say(console, head, style="bold yellow")
    for at_dev, at_train in pairs[:5]:
        say(console, f"  {dev[at_dev].place} = {train[at_train].place}")


def show_sample(console: "Console", number: int, sample: "Sample", tokenizer: "Tokenizer") -> None:
    """One sample as the model reads it."""
    from glm_accelerate.runtime.screen import say

    coloured = console.color_system is not None
    how = "in green" if coloured else "between ⟦ and ⟧"
    learnt = f"{int(sample.targets.sum()):,} of them learnt: {how}, line ends as ↵"
    head = f"  {sample.place}, {len(sample):,} tokens, {learnt}"
    say(console, (f"\nSample {number}", "bold"), head)
    console.print(render(sample, tokenizer, coloured=coloured), soft_wrap=True)  # no space is lost


def render(sample: "Sample", tokenizer: "Tokenizer", *, coloured: bool) -> "Text":
    """Text with special tokens, where the targets stand out."""
    import numpy as np
    from rich.text import Text

    text = Text()
    cuts = np.flatnonzero(np.diff(sample.targets)) + 1
    for tokens, learnt in zip(np.split(sample.tokens, cuts), np.split(sample.targets, cuts), strict=True):
        words = visible(tokenizer.decode(tokens.tolist(), skip_special=False))
        if not learnt[0]:
            text.append(words)
            continue
        # A line end has no colour of its own, and GLM-4 has to learn the one after <|assistant|>.
        words = words.replace("\n", "↵\n")
        text.append(words if coloured else f"⟦{words}⟧", LEARNT)
    return text


def visible(text: str) -> str:
    """Text with pictures of its control characters, which must not reach the terminal as commands."""
    return text.translate(PICTURES)


def _bar(share: float) -> str:
    """A bar in eighths of a character."""
    eighths = round(share * BAR_WIDTH * 8)
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return bar or ("▏" if share else "")
