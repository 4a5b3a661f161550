"""Every test that found.md names, against the source before the faults were mended and against today's.

python tests/faults/before.py [COMMIT]      prints those that pass before, or do not pass now
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("found.md")


def outcome(test: str, source: Path) -> bool:
    """Whether it passes with this source."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
    return done.returncode == 0


def main(commit: str) -> int:
    """0 if all of them failed before and pass now."""
    tests = list(
        dict.fromkeys(re.findall(r"`([a-z_0-9/]+\.py::test_\w+)`", FOUND.read_text(encoding="utf-8")))
    )
    odd = 0
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(old), commit], cwd=ROOT, check=True)
        try:
            for test in tests:
                before, now = outcome(test, old / "src"), outcome(test, ROOT / "src")
                odd += before or not now
                print(
                    f"{'passes' if before else 'fails'} before, {'passes' if now else 'FAILS'} now: {test}",
                    flush=True,
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    print(f"{len(tests)} tests, {odd} not as expected")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "e58abdb"))
