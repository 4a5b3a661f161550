"""What is on the screen after a run in a real terminal: one display, and no line of the run lost."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.errors import ExitCode
from tests.warm import UNMEASURED_COMMAND

ROWS = 45
CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class Screen:
    """A terminal with endless scrollback: what is shown, and what was overwritten is gone."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column = columns, 0, 0
        self.rows: list[list[str]] = [[]]

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = CONTROL.match(text, at)
            if found is None:
                self._letter(text[at])
                at += 1
                continue
            self._control(found.group(1), found.group(2))
            at = found.end()

    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows)

    def _control(self, number: str, kind: str | None) -> None:
        if kind == "A":
            self.row = max(0, self.row - int(number or 1))
        elif kind == "K":
            start = 0 if number == "2" else self.column
            del self.rows[self.row][start:]
        else:  # colours, the cursor shown or hidden, titles
            assert kind in ("m", "h", "l", None), f"unknown control {number}{kind}"

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._down()
        else:
            width = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
            if self.column + width > self.columns:
                self._down()
                self.column = 0
            row = self.rows[self.row]
            row += " " * (self.column + width - len(row))
            row[self.column : self.column + width] = [letter, ""][:width]
            self.column += width

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])


def in_terminal(words: list[str], columns: int, interrupt_at: bytes = b"") -> tuple[int, str]:
    """The exit code of a command in a terminal, and all that it wrote there. Ctrl-C is typed once these bytes
    are seen.
    """
    child, terminal = pty.fork()
    if not child:
        os.execve(sys.executable, words, {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    written = bytearray()
    try:
        while portion := os.read(terminal, 1 << 16):
            written += portion
            if interrupt_at and interrupt_at in written:
                os.write(terminal, b"\x03")
                interrupt_at = b""
    except OSError:  # the last process has closed it
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode(errors="replace")


def expected_words(event: dict[str, Any]) -> str | None:
    """The beginning of the line that an event has on the screen."""
    step = f"{event.get('step', 0):,}"
    lines: dict[str, Callable[[], str]] = {
        "eval": lambda: f"evaluation step {step}: ",
        "checkpoint": lambda: f"checkpoint {event['path']} (",
        "decision": lambda: f"decision {event['said']}",
        "warning": lambda: f"warning {event['said']}",
        "stop": lambda: f"stopped at step {step}: {event['reason']}",
    }
    return lines[event["kind"]]() if event["kind"] in lines else None


def without_spaces(text: str) -> str:
    """A terminal breaks long lines anywhere."""
    return "".join(text.split())


@pytest.mark.parametrize(
    ("columns", "ranks"), [(80, 1), (80, 2), pytest.param(120, 1, marks=pytest.mark.prove)]
)
def test_every_line_of_a_run_is_left_on_the_screen(
    columns: int, ranks: int, tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    words = command(tiny_run, tmp_path, steps=40)
    code, written = in_terminal([*words, "--nproc", str(ranks)], columns)
    assert code == 0, written
    text = left_on_screen(written, columns, tmp_path / "run", {"evaluation", "checkpoint", "stopped"})
    assert without_spaces(text).count("step40/40") == 1
    assert "0:00:00 left" in text


def test_a_run_that_is_interrupted_says_so_last(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    words = command(tiny_run, tmp_path, steps=100_000)
    code, written = in_terminal(words, 100, interrupt_at=b"checkpoints/checkpoint-")
    assert code == ExitCode.STOPPED, written
    text = left_on_screen(
        written, 100, tmp_path / "run", {"checkpoint", "stopped"}
    )  # no evaluation may have ended yet
    *_, stopped, again = text.strip().splitlines()
    assert re.fullmatch(r"stopped at step [\d,]+: SIGINT", stopped)
    assert again == "run the same command again to go on"


def command(tiny_run: dict[str, Any], folder: Path, steps: int) -> list[str]:
    said = {**tiny_run, "optim": {"learning_rate": 1e-2}, "evaluate": {**tiny_run["evaluate"], "every": 4}}
    said["train"] = {"steps": steps, "step_samples": 4}
    (folder / "c.yaml").write_text(yaml.safe_dump(said))
    return [*UNMEASURED_COMMAND, "train", str(folder / "c.yaml"), "--run", str(folder / "run")]


def left_on_screen(written: str, columns: int, run: Path, kinds: set[str]) -> str:
    """What is there in the end: every line of the run once, of these kinds among them, and no bar of what has
    been prepared.
    """
    screen = Screen(columns)
    screen.feed(written)
    shown = without_spaces(screen.text())
    lines = [words for event in read_events(run / "events.jsonl") if (words := expected_words(event))]
    assert {line.split()[0] for line in lines} >= kinds, json.dumps(lines)
    for line in lines:
        assert shown.count(without_spaces(line)) == 1, f"{line}\n---\n{screen.text()}"
    assert "preparing" not in shown
    return screen.text()
