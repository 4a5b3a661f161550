"""What a plan stands on: the model, the data, the machine, and what was measured on it."""

from collections.abc import Callable
from dataclasses import dataclass

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.kernels.choose import Form
from glm_accelerate.models.families import Family
from glm_accelerate.models.locate import locate
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.models.weights import read_config
from glm_accelerate.plan.cost import CPU_BANDWIDTH, Speed, speed_of
from glm_accelerate.plan.hardware import Hardware


@dataclass(frozen=True, slots=True)
class MachineMeasurement:
    """On this machine, by plan/probe.py."""

    form: Form
    process: int  # bytes besides tensors
    tensors: int  # bytes of tensors that were there meanwhile
    products: float  # a second, of one process as trained, in blocks
    head: float  # and in the head with its loss
    first: float  # seconds that the first step takes more than others
    started: float  # seconds that a pass takes for a block however few tokens it has
    together: int = 1  # processes that trained at the same time

    @property
    def speed(self) -> Speed:
        said = f"{self.products / 1e12:.3g} TFLOP/s, measured with blocks of the model"
        return Speed(self.products, CPU_BANDWIDTH, said, self.first, self.started, self.head)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a plan stands on."""

    family: Family
    sizes: Sizes
    inputs: Inputs
    hardware: Hardware
    ranks: int = 1
    measured: tuple[MachineMeasurement, ...] = ()  # of each form that came into question

    def measurement(self, form: Form) -> MachineMeasurement | None:
        """In this form, else in one that was measured."""
        exact = [each for each in self.measured if each.form == form]
        return next(iter(exact or self.measured), None)

    def speed(self, compute: str, form: Form) -> Speed | None:
        """Of one process: as measured, else as assumed."""
        measured, hardware = self.measurement(form), self.hardware
        speed = speed_of(hardware, compute) if measured is None else measured.speed
        threads = hardware.threads or hardware.cores
        got = 1.0 if measured is None else min(1.0, hardware.cores / (measured.together * threads))
        share = min(1.0, hardware.cores / (self.ranks * threads))
        return speed if speed is None or hardware.device != "cpu" else speed.shared(share / got)


def ground_of(
    config: RunConfig,
    hardware: Hardware,
    ranks: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> Ground:
    """What a config's plan stands on; prepares the data if it is not cached."""
    directory = locate(config.model.path)
    family, sizes, _ = read_config(directory)
    return Ground(family, sizes, open_inputs(config.data, directory, progress), hardware, ranks)
