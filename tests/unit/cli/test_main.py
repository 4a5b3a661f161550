import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_accelerate.cli import main as cli
from glm_accelerate.runtime.errors import UserError

LIGHT = """
import sys
from glm_accelerate.cli.main import main
try:
    code = main({words!r})
except SystemExit as stop:
    code = stop.code
heavy = {{"torch", "pydantic", "numpy", "transformers", "yaml", "rich"}} & set(sys.modules)
sys.exit(f"{{code}} {{heavy}}" if code or heavy else 0)
"""


def ask(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm_accelerate.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


@pytest.mark.process
@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], *([verb, "--help"] for verb in cli.VERBS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    command = [sys.executable, "-c", LIGHT.format(words=words)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "glm-accelerate" in answer.stdout


def test_help_lists_the_verbs_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert listed == set(cli.VERBS)
    assert max(map(len, lines)) <= 100


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plna"], "there is no verb `plna` (did you mean `plan`?)"),
        (
            ["plan", "--jsno"],
            "glm-accelerate plan: unrecognized arguments: --jsno (glm-accelerate plan --help)",
        ),
        (["plan", "--js"], "glm-accelerate plan: unrecognized arguments: --js (glm-accelerate plan --help)"),
        (["plan", "no.yaml"], "no.yaml: cannot be read: No such file or directory"),
        (
            ["plan"],
            "a config is needed: CONFIG, preset:NAME, --stock-config YAML DATA_DIR MODEL_DIR, or "
            "--llamafactory-config YAML",
        ),
        (
            ["evaluate", "x", "--data", "y", "--max-tokens", "5"],
            "glm-accelerate evaluate: argument --max-tokens: 5 is not a whole number from 16 on "
            "(glm-accelerate evaluate --help)",
        ),
        (
            ["evaluate", "x", "--data", "y", "--predictions", "no/p.jsonl"],
            "no/p.jsonl: there is no such directory to write in",
        ),
        (
            ["chat", "x", "--max-new-tokens", "-2"],
            "glm-accelerate chat: argument --max-new-tokens: -2 is not a whole number from 1 on "
            "(glm-accelerate chat --help)",
        ),
        (["plan", "a\x1b[31m\nb"], "a\\x1b[31m\\nb: cannot be read: No such file or directory"),
    ],
)
def test_the_users_mistakes_are_one_line_and_exit_2(tmp_path: Path, words: list[str], expected: str) -> None:
    answer = ask(*words, cwd=tmp_path)
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", f"error: {expected}\n")


def raising(error: BaseException) -> object:
    def dispatch(words: list[str]) -> int:
        raise error

    return dispatch


def test_what_happens_in_a_verb_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_dispatch", raising(UserError("wrong", where="a.yaml:3", cure="mend it")))
    assert cli.main(["x"]) == 2
    assert capsys.readouterr().err == "error: a.yaml:3: wrong (mend it)\n"
    monkeypatch.setattr(cli, "_dispatch", raising(KeyboardInterrupt()))
    assert cli.main(["x"]) == 75
    assert capsys.readouterr().err == "stopped\n"
    monkeypatch.setattr(cli, "_dispatch", raising(RuntimeError("oh")))
    assert cli.main(["x"]) == 1
    told = capsys.readouterr().err
    assert "RuntimeError: oh" in told
    assert told.splitlines()[-1].startswith("error: this is a bug in glm-accelerate")


def test_what_a_disk_refuses_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full, over quota, read-only or not ours: one line with the name, if there is one. Other errors of the
    system stay ours.
    """

    def told(error: OSError, code: int) -> str:
        monkeypatch.setattr(cli, "_dispatch", raising(error))
        assert cli.main(["x"]) == code
        return capsys.readouterr().err

    make_room = "(make room, then run the same again)\n"
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert told(OSError(number, os.strerror(number)), 2) == f"error: {os.strerror(number)} {make_room}"
    assert told(OSError(errno.ENOSPC, "full", "a/b"), 2) == f"error: a/b: full {make_room}"
    for number in (errno.EROFS, errno.EACCES, errno.EPERM):
        line = told(OSError(number, os.strerror(number), "a/b"), 2)
        assert line.startswith(f"error: a/b: {os.strerror(number)} (let this user read and write there")
        assert line.count("\n") == 1
    for error in (PermissionError(errno.EPERM, "no file is named"), OSError(errno.EIO, "broken", "a/b")):
        assert "this is a bug" in told(error, 1)


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_output_to_a_full_disk() -> None:
    """As it is really written; Python does not complain once more when it exits."""
    command = [sys.executable, "-m", "glm_accelerate.cli.main", "--help"]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    told = "error: No space left on device (make room, then run the same again)\n"
    assert (answer.returncode, answer.stderr) == (2, told)


def test_the_error_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert cli.main(["nothere"]) == 2
    assert "\x1b[1;31merror: \x1b[0m\x1b[31mthere is no verb `nothere`" in stream.getvalue()


@pytest.mark.process
@pytest.mark.parametrize("given", ["exec >&-", "exec 2>&-", "exec >&- 2>&-", "exec 2>&1"])
def test_a_reader_that_goes_away_is_no_bug(given: str) -> None:
    """Nor is a stream that was closed from the start."""
    script = f"{given}; '{sys.executable}' -m glm_accelerate.cli.main doctor"
    read, write = os.pipe()
    os.close(read)  # nobody reads: every write fails
    answer = subprocess.run(
        ["sh", "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(write)
    assert (answer.returncode, answer.stderr) == (0, b"")


@pytest.mark.process
def test_a_terminal_without_our_marks_ends_nothing(tmp_path: Path) -> None:
    """A GBK terminal has no check mark, and what it shows is less than a run is worth."""
    script = (
        "import sys; from glm_accelerate.cli import main; main._dispatch = lambda words: print('✓ 好') or 0"
    )
    answer = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(main.main(['x']))"],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "gbk"},
    )
    assert (answer.returncode, answer.stdout.decode("gbk"), answer.stderr) == (0, "? 好\n", b"")
