"""Operators that do the same, side by side: milliseconds of a pass forward and backward, memory that it takes
beside its inputs and results, and how far it is from float64. Used by the benchmarks next to this file.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import origin, page, publish, table

Work = Callable[[], list[Tensor]]  # a pass: what it returns, and the gradients


@dataclass(frozen=True)
class Rival:
    """One way to do a case. Without `work` it is not here, and `absent` says why."""

    name: str
    work: Work | None
    absent: str = ""


@dataclass(frozen=True)
class Case:
    """`exact` is the pass in float64, where it is small enough."""

    name: str
    rivals: tuple[Rival, ...]
    exact: Work | None = None


@dataclass(frozen=True)
class Figure:
    """One line of the table. Error: the largest of all results, as a share of the largest number there."""

    case: str
    rival: str
    milliseconds: float | None
    fastest: float | None
    peak_bytes: int | None
    error: float | None
    said: str


def figures_of(case: Case, rounds: int, device: torch.device) -> Iterable[Figure]:
    """Rivals take turns, so that a slow minute of the machine is everybody's."""
    exact = case.exact() if case.exact else None
    errors: dict[str, float | None] = {}
    peaks: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    for rival in case.rivals:
        if rival.work is None:
            failed[rival.name] = rival.absent
            continue
        try:
            errors[rival.name] = None if exact is None else error(rival.work(), exact)
            peaks[rival.name] = peak(rival.work, device)
        except Exception as problem:  # noqa: BLE001 (a rival that cannot do it is a finding, and is written down)
            failed[rival.name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    running = [(rival.name, rival.work) for rival in case.rivals if rival.work and rival.name not in failed]
    taken: dict[str, list[float]] = {name: [] for name, _ in running}
    for _ in range(rounds):
        for name, work in running:
            taken[name].append(milliseconds(work, device))
    for rival in case.rivals:
        times = taken.get(rival.name)
        yield Figure(
            case.name,
            rival.name,
            median(times) if times else None,
            min(times) if times else None,
            peaks.get(rival.name) if times else None,
            errors.get(rival.name),
            failed.get(rival.name, ""),
        )


def milliseconds(work: Work, device: torch.device) -> float:
    finish(device)
    began = time.perf_counter()
    work()
    finish(device)
    return 1e3 * (time.perf_counter() - began)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(work: Work, device: torch.device) -> int | None:
    """Of a second pass: in the first one kernels are compiled and libraries take what they keep."""
    work()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    return max(float((one.double() - true).abs().max() / true.abs().max()) for one, true in pairs)


def cells(one: Figure) -> Sequence[str]:
    times = (f"{x:.3f}" if x is not None else "" for x in (one.milliseconds, one.fastest))
    size = f"{one.peak_bytes / 1e6:,.0f}" if one.peak_bytes is not None else ""
    return one.case, one.rival, *times, size, f"{one.error:.1e}" if one.error is not None else "", one.said


def main(name: str, about: str, cases: Callable[[torch.device, bool], Iterable[Case]]) -> None:
    """Measures what `cases(device, tiny)` yields, prints the table and publishes it as kernels-<name>."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, help="folder for the Markdown and the JSON")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.tiny:
        parser.error("no CUDA device: --tiny runs small sizes on the CPU")
    figures: list[Figure] = []
    for case in cases(device, given.tiny):
        figures += figures_of(case, given.rounds, device)
    source = origin(
        ["python", "-m", f"benchmarks.kernels.{name}", *sys.argv[1:]], {"torch": torch.__version__}
    )
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    columns = ("case", "by", "ms", "fastest", "beside inputs, MB", "error", "")
    facts = [gpu, f"medians of {given.rounds} rounds in turn"]
    text = page(about, source, facts, table(columns, map(cells, figures), left=(0, 1, 6)))
    title = f"kernels-{name.replace('_', '-')}{'-tiny' if given.tiny else ''}"
    publish(given.out, title, source, text, {"gpu": gpu, "figures": [asdict(one) for one in figures]})
