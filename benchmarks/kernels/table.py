"""Every element-wise Triton kernel against plain PyTorch, torch.compile and, where it is installed,
Liger-Kernel: time, share of the device's bandwidth, and errors in bfloat16 against float64.

    python -m benchmarks.kernels.table --out benchmarks/results      on a GPU
    python -m benchmarks.kernels.table --tiny                        all of it on a CPU, kernels interpreted
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.kernels.cases import CASES, TINY, Case, Function, Sizes
from benchmarks.kernels.figures import Figures, bandwidth, measured
from benchmarks.race.report import Origin, origin, publish

ABOUT = """\
Time: medians of the device's own time, from a cold cache, of the forward pass and of both passes. Share: what
has to be moved once (inputs, outputs, slopes, gradients; no weights, nothing twice) a second, of what a large
copy reads and writes a second here: {rate:,.0f} GB/s. Error, and slopes' error: the largest against float64,
as a share of the largest number there. Good: at most twice plain PyTorch's in the same dtype, and one
rounding more, in every output and every gradient.
"""
INTERPRETED = "Kernels were interpreted, in float32, and torch.compile made no code: the times say nothing.\n"
HEADER = (
    "| operator | | forward, µs | share | both, µs | share | plain / this | error | slopes' error | |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
)


def ways(case: Case, tiny: bool) -> dict[str, Function]:
    found = {
        "plain PyTorch": case.plain,
        "torch.compile": torch.compile(case.plain, backend="aot_eager" if tiny else "inductor"),
        "ours": case.mine,
    }
    if case.liger is not None and not tiny and find_spec("liger_kernel"):
        import liger_kernel.ops  # pyright: ignore[reportMissingImports]

        found["Liger-Kernel"] = case.liger(liger_kernel.ops)
    return found


def table(lines: Sequence[Figures]) -> str:
    plain = {line.operator: line.both_seconds for line in lines if line.way == "plain PyTorch"}
    verdicts = {None: "", True: "good", False: "BAD"}
    return "\n".join([HEADER, *(row(line, plain[line.operator], verdicts[line.ok]) for line in lines)])


def row(line: Figures, plain: float, verdict: str) -> str:
    one, other = (f"{error:.1e}" if error else "" for error in (line.forward_error, line.gradient_error))
    forward = f"{line.forward_seconds * 1e6:,.1f} | {line.forward_share:.0%}"
    both = f"{line.both_seconds * 1e6:,.1f} | {line.both_share:.0%}"
    faster = f"{plain / line.both_seconds:.2f}"
    return f"| {line.operator} | {line.way} | {forward} | {both} | {faster} | {one} | {other} | {verdict} |"


def markdown(source: Origin, device: str, rate: float, lines: Sequence[Figures], tiny: bool) -> str:
    return "\n".join(
        [
            "# Triton kernels\n",
            f"- {source.date}; {device}; {source.machine}",
            f"- `{source.command}`",
            f"- commit {source.commit}",
            "- " + ", ".join(f"{name} {number}" for name, number in source.versions.items()) + "\n",
            ABOUT.format(rate=rate / 1e9),
            *([INTERPRETED] if tiny else []),
            table(lines),
            "",
        ]
    )


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every Triton kernel: time, bandwidth, errors.")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, tiny and in float32, interpreted")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="directory for the Markdown and JSON; default: only print")
    given = parser.parse_args(words)
    if not given.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: --tiny runs all of it on a CPU")
    return given


def main(words: Sequence[str]) -> int:
    given = arguments(words)
    if given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton is imported when the first kernel runs
    device = torch.device("cpu" if given.tiny else "cuda")
    dtype = torch.float32 if given.tiny else torch.bfloat16  # the interpreter rounds bfloat16 wrongly
    packages = {name: version(name) for name in ("torch", "triton", "liger_kernel") if find_spec(name)}
    source = origin(["python", "-m", "benchmarks.kernels.table", *words], packages)
    rate = bandwidth(device)
    lines: list[Figures] = []
    for make in CASES:
        case = make(TINY if given.tiny else Sizes())
        if given.only in case.name:
            lines += measured(case, ways(case, given.tiny), device, dtype, rate)
            torch.compiler.reset()  # or the next case would count towards the limit of compilations
            print(f"{case.name}: done", file=sys.stderr, flush=True)
    name = "this CPU" if given.tiny else torch.cuda.get_device_name(device)
    text = markdown(source, name, rate, lines, given.tiny)
    print(text)
    if given.out is not None:
        figures = {"device": name, "bandwidth": rate, "lines": [asdict(line) for line in lines]}
        publish(given.out, "kernels-tiny" if given.tiny else "kernels", source, text, figures)
    return 1 if any(line.way == "ours" and line.ok is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
