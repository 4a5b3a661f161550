"""The findings of a GPU run as a page: what passed, operators, and training beside the stock way.

python -m benchmarks.gpu.page OUT   makes it anew from OUT/gpu.jsonl, which may be several runs' put together
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.finding import Finding, Log
from benchmarks.report import number, origin, page, publish

TINY = "Tiny sizes on a CPU: this shows that everything runs, and nothing about speed.\n"
COLUMNS = (
    "| | tokens/s | to stock | utilisation | of data sheet | peak, GB | above weights | to stock | useful |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def write_page(out: Path, log: Log, tiny: bool, command: Sequence[str]) -> None:
    """Beside the findings, with the day in its name."""
    by_part = {
        finding.part: finding for finding in log.read()
    }  # a part that ran twice counts once, the later
    versions = by_part["machine"].figures.get("versions", {}) if "machine" in by_part else {}
    source = origin(command, versions)
    device = by_part["machine"].figures.get("device", "?") if "machine" in by_part else "?"
    findings = list(by_part.values())
    text = page(
        "GPU run",
        source,
        [device],
        *([TINY] if tiny else []),
        *checks(findings),
        *operators(findings),
        *training(by_part),
        *memory(by_part),
        *generation(by_part),
    )
    content = [{"part": one.part, "ok": one.ok, "figures": one.figures} for one in findings]
    publish(out, "gpu-tiny" if tiny else "gpu", source, text, {"findings": content})


def checks(findings: Sequence[Finding]) -> list[str]:
    """One line for each that has to pass, and for what could not be done."""
    lines = ["## Checks\n", "| part | | |", "| --- | --- | --- |"]
    for one in findings:
        reasons = [one.figures.get(key) for key in ("error", "left out", "out of memory")]
        reason = next((each for each in reasons if isinstance(each, str)), "")
        if one.ok is not None or reason:
            verdict = {True: "passed", False: "FAILED", None: "not measured"}[one.ok]
            lines.append(f"| {one.part} | {verdict} | {' '.join(reason.split())[:200]} |")
    return lines


def operators(findings: Sequence[Finding]) -> list[str]:
    lines = [
        "\n## Operators of a block, bfloat16, forward and backward\n",
        "| | ms | by definition | faster | of bandwidth | error | of definition |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in findings:
        if one.part.startswith("operator ") and "seconds" in one.figures:
            each = one.figures
            lines.append(
                f"| {each['name']} | {1e3 * each['seconds']:.3f} | {1e3 * each['reference_seconds']:.3f} | "
                f"{each['reference_seconds'] / each['seconds']:.2f} | {each['share_of_bandwidth']:.0%} | "
                f"{each['error']:.1e} | {each['reference_error']:.1e} |"
            )
    return lines


def memory(by_part: dict[str, Finding]) -> list[str]:
    """Foretold beside counted."""
    rows = [(name, one.figures) for name, one in by_part.items() if name.startswith("memory, ")]
    if not rows:
        return []
    lines = [
        "\n## Memory of a step, GB that tensors take\n",
        "| | foretold | counted | apart | foretold, with what is assumed | asked for, in all |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, each in rows:
        counted = f"{each['measured'] / 1e9:.2f} | {each['apart']:+.1%}" if "measured" in each else "- | -"
        foretold, whole = each["predicted"] / 1e9, each["predicted, with what is assumed"] / 1e9
        name = name.removeprefix("memory, ")
        lines.append(f"| {name} | {foretold:.2f} | {counted} | {whole:.2f} | {each['asked for']} |")
    return lines


def generation(by_part: dict[str, Finding]) -> list[str]:
    """Ours, and below it what it is compared with."""
    runs = {name: one.figures for name, one in by_part.items() if "answer_tokens_per_second" in one.figures}
    if not runs:
        return []
    lines = [
        "\n## Answers\n",
        "| | prefill, s | decode, s | whole, s | answer tokens/s | theirs / ours: prefill | decode | whole |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in runs.items():
        taken = [number(each[f"{part}_seconds"]) for part in ("prefill", "decode", "whole")]
        ratios = [f"{ratio:.2f}" for ratio in each.get("theirs / ours", {}).values()] or [""] * 3
        cells = [*taken, number(each["answer_tokens_per_second"]), *ratios]
        lines.append(f"| {name.removeprefix('generation ')} | {' | '.join(cells)} |")
    return lines


def training(by_part: dict[str, Finding]) -> list[str]:
    """Every job, ours in each way and stock below it. The share of products is of the profiled step."""
    lines = ["\n## Training\n", *COLUMNS]
    shares: list[str] = []
    for one in by_part.values():
        figures = one.figures
        if "tokens_per_second" not in figures:
            continue
        case = next(case for case in CASES if case.name == one.part.split(" ")[0])
        stock = by_part.get(f"{case.beside or case.name} stock")
        lines.append(line(one, stock.figures if stock else {}))
        if "breakdown" in figures:
            spent = figures["breakdown"]
            parts = [
                f"{kind} {taken / spent['seconds']:.0%}" for kind, taken in spent["classes"].items() if taken
            ]
            waits = spent["synchronisations"]
            shares.append(f"- {one.part}: {', '.join(parts)}; waits for the device: {waits}")
    return [*lines, "\n## One step\n", *shares]


def line(one: Finding, stock: dict[str, Any]) -> str:
    figures = one.figures

    def ratio(key: str) -> str:
        mine, theirs = figures.get(key), stock.get(key)
        return f"{mine / theirs:.2f}" if mine and theirs else ""

    def size(key: str) -> str:
        return number(figures[key] / 1e9) if figures.get(key) is not None else ""

    sheet = figures.get("utilisation_of_data_sheet")
    cells = (
        number(figures["tokens_per_second"]),
        ratio("tokens_per_second"),
        f"{figures['utilisation']:.1%}",
        f"{sheet:.1%}" if sheet else "",
        size("peak_bytes"),
        size("peak_above_weights"),
        ratio("peak_above_weights"),
        f"{figures['useful']:.0%}",
    )
    return f"| {one.part} | {' | '.join(cells)} |"


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Log(Path(sys.argv[1]) / "gpu.jsonl"), False, ["benchmarks/gpu.sh"])
