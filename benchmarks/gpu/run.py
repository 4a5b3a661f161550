"""What a machine with a GPU is asked to show: correctness, kernels, and training GLM-4-9B-0414 at full size
with random weights, ours and the stock way. Each part has a process of its own with its own time limit.

Findings go to OUT/gpu.jsonl at once, the most important first; at the end they become a page.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.finding import Finding, Log
from benchmarks.gpu.page import write_page
from benchmarks.gpu.part import NO_DEVICE, parts

SECONDS = 1_500  # of everything together


def run_part(names: Sequence[str], log: Log, tiny: bool, seconds: float) -> None:
    """A process that is killed or dies leaves a line too."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", "--log", str(log.path), *names]
    part = names[0] if len(names) == 1 else "all parts"
    child = subprocess.Popen(command + ["--tiny"] * tiny, start_new_session=True)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        log.add(Finding(part, False, {"error": f"killed after {seconds:.0f} s"}))
        return
    finally:
        if child.poll() is None:
            os.killpg(
                child.pid, signal.SIGKILL
            )  # with whatever it started: the next part wants the GPU alone
            child.wait()
    if code == NO_DEVICE:
        raise SystemExit("no CUDA device: --tiny runs the same at tiny size on the CPU")
    if code:
        log.add(Finding(part, False, {"error": f"ended with {code}"}))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where gpu.jsonl goes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of it ({SECONDS:,})")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts())} (all)")
    given = parser.parse_args(words)
    strange = [part for part in given.parts if part not in parts()]
    if strange:
        parser.error(f"there is no part {strange[0]!r}: there are {', '.join(map(repr, parts()))}")
    log = Log(given.out / ("gpu-tiny.jsonl" if given.tiny else "gpu.jsonl"))
    if not given.parts:
        log.path.unlink(missing_ok=True)  # parts that are named are added to what is there
    wanted = given.parts or list(parts())
    ends, before = time.monotonic() + given.seconds, len(log.read())
    for names in [wanted] if given.tiny else [[name] for name in wanted]:
        left = ends - time.monotonic()
        if left < 1:
            log.add(Finding(names[0], None, {"left out": f"{given.seconds:.0f} s were over"}))
            continue
        run_part(names, log, given.tiny, min(left, sum(parts()[name] for name in names)))
    write_page(given.out, log, given.tiny, ["benchmarks/gpu.sh", *words])
    return 1 if any(finding.ok is False for finding in log.read()[before:]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
