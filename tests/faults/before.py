"""Every test that found.md names, against the source before the faults were mended and against today's.

python tests/faults/before.py [COMMIT] [TEST ...]      prints how each ends before and now

A † behind a name: a guard of what the repair could have broken, which passes before, too.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("found.md")


def outcome(test: str, root: Path) -> bool:
    """Whether it passes in this tree."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"]
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, check=False)
    return done.returncode == 0


def main(commit: str, only: list[str]) -> int:
    """0 if all of them pass now and all but guards failed before."""
    named = re.findall(r"`([a-z_0-9/]+\.py::test_\w+)`(†?)", FOUND.read_text(encoding="utf-8"))
    tests = {test: bool(guard) for test, guard in named if not only or test in only}
    odd = 0
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(old), commit], cwd=ROOT, check=True)
        try:
            shutil.rmtree(old / "tests")
            shutil.copytree(ROOT / "tests", old / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            for test, guard in tests.items():
                before, now = outcome(test, old), outcome(test, ROOT)
                odd += before is not guard or not now
                print(
                    f"{'passes' if before else 'fails'} before, {'passes' if now else 'FAILS'} now: {test}",
                    flush=True,
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    print(f"{len(tests)} tests, {odd} not as expected")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "e58abdb", sys.argv[2:]))
