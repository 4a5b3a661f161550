"""Loading trained tensors into a model: the one way for all who do it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from glm_accelerate.checkpoint.format import WEIGHTS
from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.shard import free
from glm_accelerate.parallel.table import ONE_PROCESS, CutTable
from glm_accelerate.runtime.errors import UserError


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint's Reader, or tensors in memory."""

    def names(self, group: str) -> list[str]:
        """The tensors of a group."""
        ...

    def shapes(self, group: str) -> Mapping[str, tuple[int, ...]]:
        """Those of the whole tensors."""
        ...

    def tensor(
        self, group: str, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor, or the region of it that begins at `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """Tensors in memory as a source."""

    groups: Mapping[str, Mapping[str, Tensor]]

    def names(self, group: str) -> list[str]:
        """The tensors of a group."""
        return list(self.groups[group])

    def shapes(self, group: str) -> Mapping[str, tuple[int, ...]]:
        """Those of the whole tensors."""
        return {name: tuple(tensor.shape) for name, tensor in self.groups[group].items()}

    def tensor(
        self, group: str, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A copy: an optimizer goes on with what it is given."""
        whole = self.groups[group][name]
        if offset is not None and shape is not None:
            region = (slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            whole = whole[tuple(region)]
        return whole.clone()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def put(model: nn.Module, source: TensorSource, where: object, table: CutTable = ONE_PROCESS) -> None:
    """Copy a source's weights into the model; each rank reads its own part alone."""
    free(model)  # first: what a forward pass has gathered are other parameters, of other weights
    parameters, shapes = trained(model), source.shapes(WEIGHTS)
    staged = table.place.count("pipeline") > 1  # other stages have the others
    if odd := sorted(parameters.keys() - shapes.keys() if staged else parameters.keys() ^ shapes.keys()):
        raise UserError(f"trains other tensors than this config, as {odd[0]}", where=where)
    for name, parameter in parameters.items():
        wanted = table.part(name, parameter).shape
        if shapes[name] != wanted:
            raise UserError(f"{name} is {list(shapes[name])}, this config wants {list(wanted)}", where=where)
    for name, parameter in parameters.items():
        local_of(parameter).copy_(table.read(name, parameter, partial(source.tensor, WEIGHTS, name)))
