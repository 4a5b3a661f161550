"""What a plan stands on: model, data and machine, what was measured on it, and what a run computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.largest import Largest, find_largest
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import BY_TOKENS, Dealing, aligned, arranged, longest_share
from glm_accelerate.kernels.choose import Form
from glm_accelerate.models.families import Family
from glm_accelerate.models.locate import locate
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.models.weights import read_config
from glm_accelerate.plan.cost import CPU_BANDWIDTH, Speed, Work, pairs, speed_of
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.runtime.errors import UserError

SAMPLED = 16  # steps, evenly chosen, that tell how much of the passes is padding


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
        why = f"{self.products / 1e12:.3g} TFLOP/s, measured with blocks of the model"
        return Speed(self.products, CPU_BANDWIDTH, why, self.first, self.started, self.head)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a plan stands on."""

    family: Family
    sizes: Sizes
    inputs: Inputs
    hardware: Hardware
    ranks: int = 1
    tensor: int = 1  # ranks that share every product and have other key heads: `sizes` are of one of them
    query: int = 1  # ... for each of which so many have the same key head
    pipeline: int = 1  # stages that the layers are divided into
    nodes: int = 1  # machines that the ranks are on
    network: float | None = None  # bytes a second of each, if somebody said
    measured: tuple[MachineMeasurement, ...] = ()  # of each form that came into question

    def shared(self, tensor: int) -> "Ground":
        """The same where so many ranks share every product. UserError if they cannot."""
        if tensor == 1:
            return self
        _require_divides("tensor", tensor, self.ranks)
        try:
            groups = min(tensor, self.sizes.kv_heads)
            return replace(self, sizes=self.sizes.part(tensor), tensor=groups, query=tensor // groups)
        except ValueError as error:
            cure = "parallel.tensor=1, or a number that divides heads and ranks"
            raise UserError(f"parallel.tensor is {tensor}: {error}", cure=cure) from error

    def staged(self, pipeline: int, stages: Sequence[int] = ()) -> "Ground":
        """The same where the layers are divided into so many stages. UserError if they cannot be.
        `stages`: how many each has, if it is said.
        """
        _require_divides("pipeline", pipeline, self.samplers)
        if self.sizes.layers < pipeline:
            what = f"parallel.pipeline is {pipeline}, the model has {self.sizes.layers} layers"
            raise UserError(what, cure="at most as many stages as layers")
        if stages and sum(stages) != self.sizes.layers:
            what = f"parallel.pipeline has {sum(stages)} layers in {pipeline} stages"
            raise UserError(
                f"{what}, the model has {self.sizes.layers}", cure=f"parallel.pipeline={pipeline}"
            )
        if not self.sizes.plain and pipeline > 1:
            raise UserError("parallel.pipeline cannot divide layers that share or factor matrices")
        return replace(self, pipeline=pipeline)

    @property
    def samplers(self) -> int:
        """How many ranks take other samples than the others."""
        return self.ranks // (self.tensor * self.query * self.pipeline)

    def measurement(self, form: Form) -> MachineMeasurement | None:
        """In this form, else in one that was measured."""
        exact = [each for each in self.measured if each.form == form]
        return next(iter(exact or self.measured), None)

    def speed(self, compute: str, form: Form) -> Speed | None:
        """The speed of one process: as measured, else as assumed."""
        measured, hardware = self.measurement(form), self.hardware
        speed = speed_of(hardware, compute, form) if measured is None else measured.speed
        threads = hardware.threads or hardware.cores
        got = 1.0 if measured is None else min(1.0, hardware.cores / (measured.together * threads))
        share = min(1.0, hardware.cores / (self.ranks * threads))
        return speed if speed is None or hardware.device != "cpu" else speed.shared(share / got)


def _require_divides(axis: str, size: int, ranks: int) -> None:
    if ranks % size:
        there = "1 rank" if ranks == 1 else f"{ranks} ranks"
        cure = f"parallel.{axis}=1, or a number of ranks (--nproc, --gpus) that it divides"
        raise UserError(f"parallel.{axis} is {size}, which does not divide {there}", cure=cure)


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


@dataclass(frozen=True, slots=True)
class Load:
    """The samples of a run and their order, whatever the sizes of its passes."""

    order: Order
    targets: NDArray[np.int32]
    steps: int
    steps_per_epoch: int
    context: int = 1  # ranks that share what is longer than a pass
    dealing: Dealing = BY_TOKENS

    @property
    def longest(self) -> int:
        """The least that a pass has to hold."""
        longest = int(self.order.lengths.max())
        return aligned(longest if self.context == 1 else longest_share(longest, self.context))

    def work(self) -> Work:
        """What all steps compute, as if every epoch drew the same samples."""
        tokens = pairs_seen = learnt = 0.0
        for start, stop, weight in self.order.spans:
            lengths = self.order.lengths[start:stop]
            drawn = max(weight, 1 / max(1, stop - start))  # an epoch has one sample of each source at least
            tokens += drawn * float(lengths.sum(dtype=np.int64))
            pairs_seen += drawn * pairs(lengths)
            learnt += drawn * float(self.targets[start:stop].sum(dtype=np.int64))
        epochs = self.steps / self.steps_per_epoch
        return Work(tokens * epochs, pairs_seen * epochs, learnt * epochs, self.steps)

    def largest(self, batching: str, micro_tokens: int, ranks: int, matter: int = 2) -> Largest:
        return find_largest(
            self.order,
            self.targets,
            batching=batching,
            micro_tokens=micro_tokens,
            position=0,
            total=self.steps,
            ranks=ranks,
            matter=matter,
            context=min(self.context, ranks),
            dealing=self.dealing,
        )

    def padding(self, batching: str, micro_tokens: int, ranks: int = 1) -> float:
        """How many positions are computed for each token, 1 without padding, as if each of several ranks had
        as many as the one with the most, for which the others wait.
        """
        if batching == "pack" and ranks == 1:
            return 1.0  # but for the rest of a row, which is cut
        steps = self.order.epoch(0)
        area = tokens = 0
        for place in np.linspace(0, len(steps) - 1, min(SAMPLED, len(steps))).round().astype(int):
            lengths: Sequence[int] = self.order.lengths[steps[place]].tolist()
            tokens += sum(lengths)
            context = min(self.context, ranks)
            shares = arranged(lengths, batching, micro_tokens, ranks, context, self.dealing)
            area += ranks * max(sum(one.area for one in own) for own in shares)
        return area / tokens
