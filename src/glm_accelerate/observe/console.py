"""What a person sees of a run: one live line on a terminal, else a plain line every few seconds.

step 120/800 · 0:01:12 left · loss 0.8123 · held out 0.9312 (step 100) · 9,876 tokens/s · 1.2 GiB · ...
A narrow terminal leaves out what comes last; a plain line begins with date and time.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from glm_accelerate.observe.events import BEGINNINGS, Event
from glm_accelerate.observe.figures import FEWEST_TO_COMPARE, evaluation, number
from glm_accelerate.plan.report import show_plan
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.prove.proof import Proof
from glm_accelerate.runtime.screen import say
from glm_accelerate.runtime.words import amount

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_REFRESHES = 0.1
BAR, WIDE = 16, 120  # columns: of the bar, and of a terminal that has room for it beside the figures
SAMPLED = (
    "  a sample: enough to compare steps on it, not for a figure to publish (evaluate RUN --samples all)"
)
STEPS_AVERAGED = 50  # for speed and time left: a single step says little where lengths differ
WARNING = ("warning ", "bold yellow")


def show_start(plan: RunPlan, proofs: Sequence[Proof], resumed: int | None, console: Console) -> None:
    """Before the first step: what will be done and why, what was proven, and where it goes on."""
    show_plan(plan.reasons, console)
    for proof in proofs:
        mark = ("✓ ", "green") if proof.ok else ("✗ ", "bold red")
        say(console, mark, (f"{proof.name} ", "bold"), proof.said)
    if resumed is not None:
        say(console, f"going on after step {resumed:,} of {plan.steps:,}", style="bold")


class ConsoleObserver:
    """Shows a run on a console (stderr, if none is given)."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        best: Callable[[], str] | None = None,
        planned: int | None = None,
    ) -> None:
        """`best`: called when training is done, for a word on the best weights. `planned`: memory."""
        self._best, self._planned = best, planned
        self._console = console or Console(stderr=True)
        terminal = self._console.is_terminal
        self._seconds = SECONDS_BETWEEN_REFRESHES if terminal else SECONDS_BETWEEN_LINES
        self._clock = clock
        self._shown = -math.inf
        self._live: Live | None = None
        self._steps = 0
        self._time = 0.0  # of the newest event
        self._not_applied = 0
        self._held_out: dict[int, float] = {}  # losses by step
        self._explained = False  # what a sample is enough for
        self._recent = deque[tuple[float, float, float]](maxlen=STEPS_AVERAGED)  # when, tokens, seconds
        self._pending: Event | None = None

    def observe(self, event: Event) -> None:
        kind = event["kind"]
        self._time = number(event, "time")
        if kind in BEGINNINGS:
            self._begin(event)
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            self._evaluation(event)
        elif kind == "checkpoint":
            size, waited = amount(number(event, "bytes")), number(event, "blocked_seconds")
            text = f"{event.get('path')} ({size}, training waited {waited:.1f} s)"
            self._say(("checkpoint ", "green"), text)
        elif kind in ("decision", "warning"):
            self._say(("decision ", "cyan") if kind == "decision" else WARNING, str(event.get("said", "")))
        elif kind == "stop":
            self._show_newest()
            self.close()
            best = self._best() if self._best is not None and event.get("reason") == "done" else ""
            self._say(f"stopped at step {number(event, 'step'):,.0f}: {event.get('reason')}{best}")
            if self._not_applied:
                self._say(WARNING, f"steps not applied (loss or gradients not finite): {self._not_applied:,}")

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, event: Event) -> None:
        self._steps, done = int(number(event, "steps")), int(number(event, "step"))
        trained = f"{number(event, 'trained_parameters'):,.0f} trained parameters"
        about = [str(event.get("family")), str(event.get("method")), str(event.get("device")), trained]
        left = f"steps {done + 1:,} to {self._steps:,}"
        about.append(left if done < self._steps else f"all {done:,} steps are done")
        self._say((" · ".join(about), "bold"))

    def _step(self, event: Event) -> None:
        if not event.get("applied", True):
            self._not_applied += 1
            text = f"step {number(event, 'step'):,.0f} was not applied: its loss or gradients were not finite"
            self._say((text, "yellow"))
        now = self._clock()
        self._recent.append((now, number(event, "tokens"), number(event, "seconds")))
        self._pending = event
        if now - self._shown >= self._seconds:
            self._show_newest()

    def _evaluation(self, event: Event) -> None:
        loss, step, samples = event.get("loss"), int(number(event, "step")), number(event, "samples")
        whole = step in self._held_out and samples == number(event, "total")
        if isinstance(loss, float):
            self._held_out[step] = loss
        style = {"done": "cyan", "skipped": "dim"}.get(str(event.get("status")), "yellow")
        self._show_newest()
        self._say(("evaluation ", style), evaluation(event, whole=whole))
        if not self._explained and FEWEST_TO_COMPARE <= samples < number(event, "total"):
            self._explained = True
            self._say((SAMPLED, "dim"))

    def _show_newest(self) -> None:
        """Show the newest step, if it has not been shown."""
        event = self._pending
        if event is None:
            return
        self._pending = None
        self._shown = self._clock()
        figures = self._figures(event)
        if not self._console.is_terminal:
            self._say(" · ".join(figures))
            return
        wide = self._console.width >= WIDE
        room = self._console.width - (BAR + 1) * wide
        while len(" · ".join(figures)) > room and len(figures) > 1:
            figures.pop()
        grid = Table.grid(padding=(0, 1))
        cells: list[ProgressBar | str] = []
        if wide:
            grid.add_column(width=BAR)
            cells.append(ProgressBar(total=max(1, self._steps), completed=number(event, "step")))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(*cells, " · ".join(figures))
        if self._live is None:
            self._live = Live(grid, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(grid, refresh=True)

    def _figures(self, event: Event) -> list[str]:
        """Of a step; what matters most comes first."""
        loss = event.get("loss")
        figures = [
            f"step {number(event, 'step'):,.0f}/{self._steps:,}",
            f"{self._time_left(event)} left",
            f"loss {loss:.4f}" if isinstance(loss, float) and math.isfinite(loss) else "loss -",
        ]
        if self._held_out:
            newest = max(self._held_out)
            figures.append(f"held out {self._held_out[newest]:.4f} (step {newest:,})")
        tokens = sum(tokens for _, tokens, _ in self._recent)
        seconds = sum(seconds for _, _, seconds in self._recent)
        return [
            *figures,
            f"{tokens / seconds if seconds else 0:,.0f} tokens/s",
            amount(number(event, "memory_bytes")) + (f" of {amount(self._planned)}" if self._planned else ""),
            f"rate {number(event, 'learning_rate'):.1e}",
        ]

    def _time_left(self, event: Event) -> str:
        """To the last step at the pace of the newest ones, evaluations and checkpoints included."""
        left = self._steps - number(event, "step")
        elapsed, counted = self._recent[-1][0] - self._recent[0][0], len(self._recent) - 1
        if not counted:
            elapsed, counted = self._recent[-1][2], 1
        return str(timedelta(seconds=round(left * elapsed / counted)))

    def _say(self, *parts: str | tuple[str, str]) -> None:
        """In a log file with date and time, as the machine's clock has them."""
        clock = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._time))
        say(self._console, *([] if self._console.is_terminal else [clock]), *parts)
