"""The command as these tests give it: several ranks in processes of their own, one in this process."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.cli.main import main

Go = Callable[..., str]


@pytest.fixture
def go() -> Go:
    """go(config, run, ranks, *words): train, without a mistake. What was said on the way."""

    def do(config: Path, run: Path, ranks: int, *more: str) -> str:
        words = ["train", str(config), "--run", str(run), *more]
        if ranks == 1:  # seconds faster
            heard = io.StringIO()
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
                code, said = main(words), heard.getvalue()
        else:
            line = [sys.executable, "-m", "glm_accelerate.cli.main", *words, "--nproc", str(ranks)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
            code, said = done.returncode, done.stdout + done.stderr
        assert code == 0, said
        return said

    return do
