"""Events to where people already look: TensorBoard, and SwanLab (offline unless the user has logged in).

Curves have the same names in both. Nothing but the config and the figures is handed on: no environment
variable, command line, host name or git remote, since those are where secrets live.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import BEGINNINGS, Event, EventLog, Events, Observer
from glm_accelerate.observe.notices import Notices, addresses_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import make_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Of a step event: its field, and the name of the curve.
CURVES = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens_per_second": "speed/tokens_per_second",
    "memory_bytes": "memory/bytes",
}


def events_of(config: RunConfig, run: Path, attempt: int, observers: Sequence[Observer] | None) -> Events:
    """The events of one attempt, told to the run's logs, its sinks and these observers. None of them, as on
    other ranks: told to nobody.
    """
    if observers is None:
        return Events([], attempt)
    logs = [EventLog(run / "events.jsonl"), EventLog(run / "evals.jsonl", kinds=("eval",))]
    told = [*open_sinks(config.observe.sinks, run, config), *_notices(config, run)]
    return Events([*logs, *told, *observers], attempt)


def _notices(config: RunConfig, run: Path) -> list[Observer]:
    addresses = addresses_of(config.observe.notify)
    return [Notices(addresses, run.resolve().name)] if addresses else []


def open_sinks(names: Sequence[str], run: Path, config: RunConfig) -> list[Observer]:
    """An observer for each name. They open at the first event."""
    require_packages(names)
    return [
        ForeignSink(TensorBoard(run / name) if name == "tensorboard" else SwanLab(run, config))
        for name in names
    ]


def require_packages(names: Sequence[str]) -> None:
    """Refuse a sink whose package, which has its name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            cure = f"pip install {name}"
            raise UserError(f"the package {name} is not installed", where="observe.sinks", cure=cure)


class ForeignSink:
    """An observer that runs other people's code: whatever goes wrong there, training goes on without it."""

    def __init__(self, sink: Observer) -> None:
        self._sink = sink

    def observe(self, event: Event) -> None:
        with self._failing_alone():
            self._sink.observe(event)

    def close(self) -> None:
        with self._failing_alone():
            self._sink.close()

    @contextmanager
    def _failing_alone(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # a network, a server, a release: no package says what it may raise
            raise OSError(f"{type(self._sink).__name__}: {error}") from error


def curves(event: Event) -> dict[str, float]:
    """The points that an event adds, by the name of their curve. What is not a number adds none."""
    values: dict[str, object] = {}
    if event["kind"] == "step":
        values = {name: event.get(field) for field, name in CURVES.items()}
    elif event["kind"] == "eval":
        values = {"eval/loss": event.get("loss")}
        metrics = cast("Mapping[str, object]", event.get("metrics") or {})
        values.update({f"eval/{name}": value for name, value in metrics.items()})
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _step(event: Event) -> int:
    return int(cast("int", event.get("step", 0)))


class TensorBoard:
    """Event files in the run directory: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def observe(self, event: Event) -> None:
        if event["kind"] in BEGINNINGS:
            self._open(event)
        if self._writer is not None:
            for name, value in curves(event).items():
                self._writer.add_scalar(name, value, _step(event))

    def _open(self, beginning: Event) -> None:
        """A resumed run takes back what an earlier attempt wrote beyond the step from which it goes on; one
        that begins anew takes back everything.
        """
        from torch.utils.tensorboard import SummaryWriter

        first = _step(beginning) + 1 if beginning["kind"] == "resume" else 0
        earlier = any(self._folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(self._folder), purge_step=first if earlier else None)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class SwanLab:
    """A SwanLab experiment: online where the user has logged in, else offline in the run directory."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._swanlab: ModuleType | None = None

    def observe(self, event: Event) -> None:
        if event["kind"] in BEGINNINGS and self._swanlab is None:
            self._swanlab = self._begin()
        points = curves(event)
        if self._swanlab is not None and points:
            self._swanlab.log(points, step=_step(event))

    def _begin(self) -> ModuleType:
        swanlab = import_module("swanlab")  # by name: not everyone who checks types has it
        folder = self._run / "swanlab"
        make_folder(folder)
        # It reads its own log-in and SWANLAB_MODE; without a log-in, online would stop and ask for one.
        settings = swanlab.Settings.model_validate(
            {
                "log_dir": folder,
                "interactive": False,
                "terminal": {"proxy_type": "none"},
                "probe": {"runtime": False, "requirements": False, "conda": False, "git": False},
            }
        )
        swanlab.init(
            mode="offline" if settings.mode == "online" and not settings.api_key else settings.mode,
            project="glm-accelerate",
            name=self._run.name,
            config=self._config.model_dump(mode="json", exclude={"observe": {"notify"}}),  # which hold keys
            settings=settings,
        )
        return swanlab

    def close(self) -> None:
        if self._swanlab is not None:
            self._swanlab.finish()
