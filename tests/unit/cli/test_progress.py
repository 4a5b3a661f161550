import io

from rich.console import Console

from glm_accelerate.cli.progress import Lines, counting, in_numbers


def test_lines_say_rate_and_time_left_every_few_seconds() -> None:
    console = Console(file=io.StringIO(), width=100)
    now = [0.0]
    count = Lines(console, in_numbers, clock=lambda: now[0])
    for done in range(0, 401, 10):
        count("held-out loss", done, 4000)
        now[0] += 0.5
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "held-out loss: 100 of 4,000, 20.0 a second, 0:03:15 left",
        "held-out loss: 200 of 4,000, 20.0 a second, 0:03:10 left",
        "held-out loss: 300 of 4,000, 20.0 a second, 0:03:05 left",
        "held-out loss: 400 of 4,000, 20.0 a second, 0:03:00 left",
    ]


def test_nothing_is_shown_for_what_is_done_at_once() -> None:
    console = Console(file=io.StringIO(), width=100)
    with counting(console) as count:
        count("held-out loss", 0, 4)
        count("held-out loss", 4, 4)
    assert isinstance(console.file, io.StringIO)
    assert not console.file.getvalue()


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with counting(console) as count:
        count("held-out loss", 64, 128)
        count("held-out loss", 100, 4000)  # the next one may have another size
    assert isinstance(console.file, io.StringIO)
    assert "held-out loss" in console.file.getvalue()


def test_what_cannot_be_counted_is_named() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, no_color=True)
        with counting(console) as count:
            count("measuring", 0, 0)
        assert isinstance(console.file, io.StringIO)
        assert "measuring ..." in console.file.getvalue()
