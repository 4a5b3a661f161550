"""Parts of the GPU run in this process, one after the other; whatever goes wrong in one is written down.

python -m benchmarks.gpu.part --log FILE [--tiny] PART...
"""

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import CASES, shrunk
from benchmarks.gpu.finding import Finding, Log

NO_DEVICE = 3  # exit code
STOCK = ("transformers", "peft", "accelerate")


def parts() -> dict[str, int]:
    """Every part and the seconds that it may take, the most important first."""
    limits = {"machine": 60, "parity": 120, "operators": 180, "fits": 300}
    limits |= {"kernel tables": 310, "generation": 560}
    return limits | {f"{case.name} {side}": case.seconds for case in CASES for side in case.sides}


def needed(part: str) -> Sequence[str]:
    """Packages without which a part is left out."""
    if part in ("parity", "generation"):
        return ("transformers",)
    if part == "kernel tables":
        return ("triton",)
    if part == "fits":
        return ("pydantic",)  # to be carried where it is missing
    if part.endswith(" stock"):
        return (*STOCK, "bitsandbytes") if part.startswith("qlora") else STOCK
    return ()


def work(part: str, device: torch.device, tiny: bool, log: Log) -> Iterator[Finding]:
    """Modules are imported here, so that one that cannot be takes no other part down with it."""
    name, _, side = part.rpartition(" ")
    case = next((case for case in CASES if case.name == name), None)
    if case is not None:
        module = import_module(f"benchmarks.gpu.{side}")
        yield from getattr(module, side)(shrunk(case) if tiny else case, device, tiny)
    elif part == "kernel tables":
        yield from import_module("benchmarks.gpu.tables").tables(log.path.parent, tiny)
    else:
        yield from getattr(import_module(f"benchmarks.gpu.{part}"), part)(device, tiny)


def attempt(part: str, log: Log, run: "partial[Iterator[Finding]]") -> None:
    absent = [name for name in needed(part) if find_spec(name) is None]
    if absent:
        log.add(Finding(part, None, {"left out": f"there is no {', '.join(absent)}"}))
        return
    try:
        for finding in run():
            log.add(finding)
    except torch.OutOfMemoryError as error:
        log.add(Finding(part, None, {"out of memory": str(error).split(". ")[0]}))
    except Exception as error:  # noqa: BLE001 (a line in the result is all that a remote run leaves)
        where = traceback.format_exc().strip().splitlines()[-6:]
        log.add(Finding(part, False, {"error": f"{type(error).__name__}: {error}", "where": where}))


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("parts", nargs="+")
    given: Any = parser.parse_args(words)
    log = Log(given.log)
    if not given.tiny and not torch.cuda.is_available():
        raise SystemExit(NO_DEVICE)
    device = torch.device("cpu" if given.tiny else "cuda")
    for part in given.parts:
        attempt(part, log, partial(work, part, device, given.tiny, log))


if __name__ == "__main__":
    main(sys.argv[1:])
