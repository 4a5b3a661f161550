"""Processes of our own find what we find, and nothing of the working directory."""

import signal
import subprocess
from pathlib import Path

from glm_accelerate.runtime.child import how_ended, python_command


def test_it_finds_our_modules_and_none_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    command = [*python_command("import json, glm_accelerate; print(sys.argv[1:])"), "word"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['word']\n"), done.stderr


def test_how_it_ended() -> None:
    assert (how_ended(3), how_ended(-signal.SIGKILL)) == ("exit code 3", "signal 9")
