import io

import pytest
from rich.console import Console

from glm_accelerate.runtime.screen import say

LINE = "warning the loss of step 1,200 jumped to four times its level, best weights are those of before"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_breaks_between_words_and_only_on_a_terminal(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=40, color_system=None)
    say(console, ("warning ", "bold"), LINE.removeprefix("warning "))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines) == LINE
    assert (max(map(len, lines)) <= 40) == terminal
    assert (len(lines) == 1) != terminal


def test_nothing_is_read_as_markup() -> None:
    console = Console(file=io.StringIO(), width=80)
    say(console, "[bold]/data[/x]", ("[red]", "dim"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[bold]/data[/x][red]\n"
