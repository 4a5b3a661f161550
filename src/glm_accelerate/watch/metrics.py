"""The newest figures of runs as Prometheus reads them: the text format, one family of samples a figure."""

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, TypeGuard

from glm_accelerate.observe.events import BEGINNINGS
from glm_accelerate.watch.run import WatchedRun

CONTENT = "text/plain; version=0.0.4"
# By the kind of event and its field: the figure's name, and what it is.
FIGURES = {
    ("begin", "steps"): ("steps", "Steps that the run will have."),
    ("begin", "ranks"): ("ranks", "Processes that train."),
    ("begin", "attempt"): ("attempt", "How often the run was started."),
    ("step", "step"): ("step", "The last step."),
    ("step", "loss"): ("loss", "Training loss of the last step."),
    ("step", "learning_rate"): ("learning_rate", "Learning rate of the last step."),
    ("step", "grad_norm"): ("gradient_norm", "Norm of the last step's gradients, before clipping."),
    ("step", "tokens_per_second"): ("tokens_per_second", "Tokens a second of the last step."),
    ("step", "seconds"): ("step_seconds", "Time of the last step."),
    ("step", "memory_bytes"): ("memory_bytes", "Most memory in use in the last step."),
    ("eval", "step"): ("evaluation_step", "The step that was evaluated last."),
    ("eval", "loss"): ("held_out_loss", "Held-out loss of the last evaluation."),
    ("checkpoint", "step"): ("checkpoint_step", "The step of the last checkpoint."),
    ("checkpoint", "bytes"): ("checkpoint_bytes", "Size of the last checkpoint."),
    ("checkpoint", "blocked_seconds"): ("checkpoint_wait_seconds", "What training waited for it."),
}
OTHERS = {
    "planned_memory_bytes": "What the plan had said of memory_bytes.",
    "evaluation": "The last evaluation's metrics, by name.",
    "warnings_total": "Warnings since the run's first start.",
    "silent_ranks": "Processes of the newest start that give no sign of life.",
    "last_event_timestamp_seconds": "When the run last said anything.",
    "ended": "1: the last start has ended, as is said in `reason`; 0: it has not, or was killed.",
}
Samples = dict[str, list[tuple[dict[str, str], float]]]  # by figure: labels and value


class Metrics:
    """Of several runs: each question reads what is new in their logs."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs, self._lock = [(run, _Newest()) for run in runs], Lock()

    def text(self) -> str:
        samples: Samples = {name: [] for name in [*(name for name, _ in FIGURES.values()), *OTHERS]}
        with self._lock:
            for run, newest in self._runs:
                newest.read(run)
                for name, labels, value in newest.samples(run):
                    samples[name].append(({"run": run.name, **labels}, value))
        return "".join(_family(name, words, samples[name]) for name, words in _words() if samples[name])


class _Newest:
    """What a run's log said last, by kind of event."""

    def __init__(self) -> None:
        self.next, self.warnings, self.time = 0, 0, 0.0
        self.last: dict[str, Mapping[str, Any]] = {}

    def read(self, run: WatchedRun) -> None:
        found = run.events(self.next)
        if found["next"] < self.next:  # the log began anew
            self.__init__()
        self.next = found["next"]
        for event in found["events"]:
            kind = "begin" if event.get("kind") in BEGINNINGS else str(event.get("kind"))
            self.time = max(self.time, event.get("time") or 0.0)
            self.warnings += kind == "warning"
            if kind == "begin":
                self.last.pop("stop", None)
            if kind != "eval" or event.get("status") == "done":
                self.last[kind] = event

    def samples(self, run: WatchedRun) -> Iterator[tuple[str, dict[str, str], float]]:
        for (kind, field), (name, _) in FIGURES.items():
            if _is_number(value := self.last.get(kind, {}).get(field)):
                yield name, {}, value
        if _is_number(planned := run.about()["memory"]):
            yield "planned_memory_bytes", {}, planned
        for metric, value in (self.last.get("eval", {}).get("metrics") or {}).items():
            if _is_number(value):
                yield "evaluation", {"metric": metric}, value
        if run.nodes():
            yield "silent_ranks", {}, len(run.missed())
        if self.last:
            stop = self.last.get("stop")
            yield "warnings_total", {}, self.warnings
            yield "last_event_timestamp_seconds", {}, self.time
            yield "ended", {"reason": str(stop.get("reason"))} if stop else {}, float(stop is not None)


def _words() -> Iterator[tuple[str, str]]:
    yield from FIGURES.values()
    yield from OTHERS.items()


def _family(name: str, words: str, samples: list[tuple[dict[str, str], float]]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP glm_{name} {words}", f"# TYPE glm_{name} {kind}"]
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"glm_{name}{{{pairs}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
