"""The tests that a processor could change, again as every kind of machine that this one can pass for.

python tests/kinds.py FIRST.xml     what pytest wrote (--junitxml) of the whole suite on this machine as it is

Prints the kinds, counts skipped tests by reason, and fails where a kind fails; in CI also where a test
ran on none.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from glm_accelerate.runtime.host import processor_flags

ROOT = Path(__file__).parents[1]
NUMBERS = (
    "tests/kernels/test_triton_decoder.py",
    "tests/unit/kernels",
    "tests/unit/models",
    "tests/unit/optim",
)
CHOICES = ("tests/unit/kernels", "tests/unit/plan")
CORES = ("tests/unit/plan", "tests/unit/evaluate/protocol/test_child.py", "tests/unit/kernels/test_native.py")
HOST = processor_flags()
# Root outside of a namespace in which it is nobody: files are its own, and what it may not read stays closed.
NOT_ROOT = ("unshare", "--user", "--map-user=65534", "--map-group=65534")
# What waits for another machine, by the reason that is given: a GPU, a package that `.[dev]` has not got,
# a browser that the system's packages did not give.
ELSEWHERE = re.compile(
    r"\bGPU\b|^no (torch varlen|flash-attn|FlexAttention)$|could not import 'swanlab'|^no Chromium here$"
)


@dataclass(frozen=True)
class Kind:
    """A machine to pass for: `needs` of this one, its variables, and the tests that matter there."""

    name: str
    tests: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    needs: str | None = None
    python: str = sys.executable
    prefix: tuple[str, ...] = ()  # of the command

    def missing(self) -> str | None:
        """Why this machine cannot pass for it."""
        if self.needs is not None and self.needs not in HOST:
            return f"this processor has no {self.needs}"
        if self.prefix and shutil.which(self.prefix[0]) is None:
            return f"there is no {self.prefix[0]}"
        if self.prefix and subprocess.run([*self.prefix, "true"], capture_output=True).returncode:
            return f"{self.prefix[0]} is not allowed here"
        return None if self.tests else "nothing was skipped that it could run"


@dataclass(frozen=True)
class Outcome:
    """Of each test by its name: None, or why it was skipped."""

    tests: dict[str, str | None]
    failed: int
    code: int

    def __str__(self) -> str:
        skipped = sum(reason is not None for reason in self.tests.values())
        passed = len(self.tests) - skipped - self.failed
        return f"{passed} tests passed, {self.failed} failed, {skipped} were skipped"


def kinds(skipped: tuple[str, ...]) -> list[Kind]:
    """`skipped`: files with tests that did not run as this machine is."""
    vectors = "ATEN_CPU_CAPABILITY"
    products = "ONEDNN_MAX_CPU_ISA"
    pythons = (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14))
    others = [path for path in pythons if path and Path(path).resolve() != Path(sys.executable).resolve()]
    return [
        Kind("AVX2", NUMBERS, {products: "AVX2", vectors: "avx2"}, "avx2"),
        Kind("AVX-512", NUMBERS, {products: "AVX512_CORE", vectors: "avx512"}, "avx512bw"),
        Kind("AVX-512 BF16, no tiles", NUMBERS, {products: "AVX512_CORE_BF16"}, "amx_bf16"),
        Kind("no C++ compiler", CHOICES, {"CXX": "no-such-compiler"}),
        Kind("one core", CORES, prefix=("taskset", "--cpu-list", "0")),
        Kind("a user who is not root", skipped, prefix=NOT_ROOT if os.geteuid() == 0 else ("env",)),
        *(Kind(Path(path).name, NUMBERS, python=path) for path in others if _has_torch(path)),
    ]


def _has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch, pytest"], capture_output=True).returncode == 0


def run(kind: Kind, folder: Path) -> Outcome:
    """Its tests."""
    report = folder / f"{len(list(folder.iterdir()))}.xml"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        **kind.environment,
    }
    command = [*kind.prefix, kind.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(
        [*command, "--dist", "worksteal", f"--junitxml={report}", *kind.tests],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    return read(report, done.returncode)


def read(report: Path, code: int = 0) -> Outcome:
    """What pytest wrote."""
    if not report.is_file():
        return Outcome({}, 0, code or 1)
    tests: dict[str, str | None] = {}
    failed = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failed += case.find("failure") is not None or case.find("error") is not None
        why = case.find("skipped")
        reason = None if why is None else why.get("message", "").removeprefix("Skipped: ")
        tests[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = reason
    return Outcome(tests, failed, code)


def main(report: Path) -> int:
    """0 if all kinds are well."""
    first = read(report)
    waiting = {name for name, why in first.tests.items() if why is not None and not ELSEWHERE.search(why)}
    outcomes = {"as this machine is": first}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kinds-") as folder:
        for kind in kinds(tuple(sorted({name.partition("::")[0] for name in waiting}))):
            missing = kind.missing()
            if missing is None:
                print(f"\nnow as: {kind.name}", flush=True)
                outcomes[kind.name] = run(kind, Path(folder))
            else:
                lines.append(f"  {kind.name}: not run, {missing}")
    reasons = Counter(why for outcome in outcomes.values() for why in outcome.tests.values() if why)
    ran = {name for outcome in outcomes.values() for name, why in outcome.tests.items() if why is None}
    never = sorted(waiting - ran)
    print("\nkinds of machine:")
    print("\n".join([*(f"  {name}: {outcome}" for name, outcome in outcomes.items()), *lines]))
    print("skipped, by reason:", *(f"  {count} {why}" for why, count in reasons.most_common()), sep="\n")
    print(
        "skipped on every kind (but those that wait for a GPU):",
        *(f"  {name}" for name in never or ["none"]),
        sep="\n",
    )
    failed = [name for name, outcome in outcomes.items() if outcome.code]
    print(f"kinds: {len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or (never and "CI" in os.environ) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
