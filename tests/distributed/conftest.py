"""The command as these tests give it: several ranks in processes of their own, one in this process."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.cli.main import main
from tests.warm import Warm

Go = Callable[..., str]


@pytest.fixture
def go(warm: Callable[..., Warm]) -> Go:
    """go(config, run, ranks, *words): train, without a mistake. What was said on the way."""

    def do(config: Path, run: Path, ranks: int, *more: str) -> str:
        words = ["train", str(config), "--run", str(run), *more]
        if ranks == 1:  # seconds faster
            heard = io.StringIO()
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
                code, said = main(words), heard.getvalue()
        else:
            done = warm(*words, "--nproc", str(ranks)).done()
            code, said = done.returncode, done.stdout + done.stderr
        assert code == 0, said
        return said

    return do
