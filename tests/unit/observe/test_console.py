import io
import time

import pytest
from rich.console import Console

from glm_accelerate.observe.console import ConsoleObserver, show_start
from glm_accelerate.observe.events import Event
from glm_accelerate.plan.run_plan import Reason, RunPlan
from glm_accelerate.prove.proof import Proof


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(terminal: bool, width: int = 140) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(console: Console) -> list[str]:
    """The lines of a log, without the clock that each begins with."""
    lines = text(console).splitlines()
    assert all(line.startswith(CLOCK) for line in lines)
    return [line.removeprefix(CLOCK) for line in lines]


NOW = 1_790_000_000.5
CLOCK = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(NOW))
START: Event = {
    "kind": "start", "time": NOW, "step": 0, "steps": 100, "family": "glm4", "method": "lora",
    "device": "cpu", "trained_parameters": 1234567,
}  # fmt: skip


def step(number: int, loss: float | None = 2.0, applied: bool = True) -> Event:
    return {
        "kind": "step", "time": NOW, "step": number, "applied": applied, "loss": loss,
        "tokens": 500, "seconds": 0.5, "memory_bytes": 1_500_000_000, "learning_rate": 3e-4,
    }  # fmt: skip


def test_lines_every_five_seconds_where_there_is_no_terminal() -> None:
    console, clock = screen(terminal=False), Clock()
    observer = ConsoleObserver(console, clock=clock)
    observer.observe(START)
    for number in range(1, 41):
        observer.observe(step(number))
        clock.now += 0.5
    lines = plain(console)
    assert lines[0] == "glm4 · lora · cpu · 1,234,567 trained parameters · steps 1 to 100"
    assert [line.split(" · ")[0] for line in lines[1:]] == [f"step {n}/100" for n in (1, 11, 21, 31)]
    assert lines[2] == "step 11/100 · 0:00:44 left · loss 2.0000 · 1,000 tokens/s · 1.4 GiB · rate 3.0e-04"
    assert not set(text(console)) & {"\x1b", "\r"}


def test_a_terminal_is_refreshed_at_most_ten_times_a_second() -> None:
    console, clock = screen(terminal=True), Clock()
    observer = ConsoleObserver(console, clock=clock)
    observer.observe(START)
    shown = 0
    for number in range(1, 101):
        before = len(text(console))
        observer.observe(step(number))
        shown += len(text(console)) > before
        clock.now += 0.01
    observer.close()
    assert 9 <= shown <= 11
    assert "step 1/100" in text(console)


def test_the_live_line_ends_on_the_last_step() -> None:
    console, clock = screen(terminal=True), Clock()
    observer = ConsoleObserver(console, clock=clock)
    for event in (START, step(99), step(100), {"kind": "stop", "step": 100, "reason": "done"}):
        observer.observe(event)
    last = text(console).splitlines()[-2:]
    assert "step 100/100" in last[0]
    assert last[1].endswith("stopped at step 100: done")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (39, "step 12/100 · 0:00:44 left"),
        (80, "step 12/100 · 0:00:44 left · loss 2.0000 · 1,000 tokens/s · 1.4 GiB"),
        (100, "step 12/100 · 0:00:44 left · loss 2.0000 · 1,000 tokens/s · 1.4 GiB · rate 3.0e-04"),
        (120, "step 12/100 · 0:00:44 left · loss 2.0000 · 1,000 tokens/s · 1.4 GiB · rate 3.0e-04"),
    ],
)
def test_a_narrow_terminal_leaves_out_what_matters_least(columns: int, line: str) -> None:
    console, clock = screen(terminal=True, width=columns), Clock()
    observer = ConsoleObserver(console, clock=clock)
    observer.observe(START)
    for number in (11, 12):
        observer.observe(step(number))
        clock.now += 0.5
    observer.close()
    assert "…" not in text(console)
    shown = text(console).split("\r")[-1].replace("\x1b[2K", "").replace("\x1b[?25h", "").strip()
    assert shown.lstrip("╺━╸ ") == line


def test_steps_that_were_not_applied_are_counted_at_the_end() -> None:
    console = screen(terminal=False)
    observer = ConsoleObserver(console, clock=Clock())
    for number in (1, 2, 3):
        observer.observe(step(number, loss=None, applied=number == 1))
    observer.observe({"kind": "stop", "time": NOW, "step": 3, "reason": "done"})
    assert plain(console)[-2:] == [
        "stopped at step 3: done",
        "warning steps not applied (loss or gradients not finite): 2",
    ]


def test_evaluations_checkpoints_and_warnings_have_a_line_of_their_own() -> None:
    console = screen(terminal=False)
    observer = ConsoleObserver(console, clock=Clock())
    said = {"time": NOW, "step": 1000, "samples": 64, "total": 4000, "seconds": 1.25}
    observer.observe(START)
    observer.observe(
        {"kind": "eval", "status": "done", "loss": 1.5, "metrics": {"exact_match": 0.25}, **said}
    )
    observer.observe({"kind": "eval", "status": "failed", "loss": None, "reason": "out of memory", **said})
    observer.observe(
        {"kind": "eval", "time": NOW, "status": "skipped", "step": 12, "reason": "a newer one waits"}
    )
    observer.observe(
        {
            "kind": "checkpoint",
            "time": NOW,
            "path": "checkpoints/checkpoint-10",
            "bytes": 2_000_000,
            "blocked_seconds": 0.1,
        }
    )
    observer.observe({"kind": "warning", "time": NOW, "said": "[red]a file named so[/red]"})
    observer.observe(step(11, loss=None, applied=False))
    observer.close()
    assert plain(console)[1:] == [
        "evaluation step 1,000: loss 1.5000, exact_match 0.250 (64 of 4,000) · 1.2 s",
        "  a sample: enough to compare steps on it, not for a figure to publish (evaluate RUN --samples all)",
        "evaluation step 1,000: failed: out of memory · 1.2 s",
        "evaluation step 12: skipped: a newer one waits",
        "checkpoint checkpoints/checkpoint-10 (1.91 MiB, training waited 0.1 s)",
        "warning [red]a file named so[/red]",
        "step 11 was not applied: its loss or gradients were not finite",
        "step 11/100 · 0:00:44 left · loss - · held out 1.5000 (step 1,000) · 1,000 tokens/s · 1.4 GiB "
        "· rate 3.0e-04",
    ]


def test_the_held_out_loss_is_of_the_highest_step_and_finalists_are_told_apart() -> None:
    console = screen(terminal=False)
    observer = ConsoleObserver(console, clock=Clock(), best=lambda: " · best: step 1,100")
    said = {"kind": "eval", "time": NOW, "status": "done", "total": 400}
    observer.observe({**START, "steps": 1200})
    for number, loss, samples in ((1100, 0.9, 20), (0, 5.9, 400), (1100, 0.8, 400)):  # 0 came late
        observer.observe({**said, "step": number, "loss": loss, "samples": samples})
    observer.observe(step(1200))
    observer.observe({"kind": "stop", "time": NOW, "step": 1200, "reason": "done"})
    observer.observe({"kind": "stop", "time": NOW, "step": 1200, "reason": "SIGINT"})
    assert plain(console)[1:] == [
        "evaluation step 1,100: loss 0.9000 (20 of 400)",  # and nothing on what 20 are enough for
        "evaluation step 0: loss 5.9000 (400 of 400)",
        "evaluation step 1,100: loss 0.8000 on all 400 samples",
        "step 1,200/1,200 · 0:00:00 left · loss 2.0000 · held out 0.8000 (step 1,100) · "
        "1,000 tokens/s · 1.4 GiB · rate 3.0e-04",
        "stopped at step 1,200: done · best: step 1,100",
        "stopped at step 1,200: SIGINT",
    ]


def test_the_start_shows_plan_proofs_and_where_it_goes_on() -> None:
    console = screen(terminal=False)
    plan = RunPlan(
        family="glm4", template="glm4-0414", device="cpu", ranks=1, shards=1, dtype="float32",
        compute="float32", steps=1200,
        steps_per_epoch=10, step_samples=4, step_tokens=None, micro_tokens=64, recompute=False,
        warmup_steps=1, codec="none", compile=False,
        evaluate_every=0, evaluate_samples=0, evaluate_where="never", evaluate_device="", evaluate_threads=0,
        reasons=(Reason("steps", "1,200", "the config"),),
    )  # fmt: skip
    show_start(plan, [Proof("labels", True, "fine"), Proof("[template]", False, "differs")], 600, console)
    lines = text(console).splitlines()
    assert lines[1].split() == ["steps", "1,200", "the", "config"]
    assert lines[2:] == ["✓ labels fine", "✗ [template] differs", "going on after step 600 of 1,200"]


def test_a_finished_run_that_starts_again_has_no_steps() -> None:
    console = screen(terminal=False)
    ConsoleObserver(console, clock=Clock()).observe({**START, "kind": "resume", "step": 100})
    assert plain(console) == ["glm4 · lora · cpu · 1,234,567 trained parameters · all 100 steps are done"]
