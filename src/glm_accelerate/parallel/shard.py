"""A model divided over ranks by FSDP2, from outside: each block is a unit, or
neighbours that share weights; the rest is the root's.

data x shard: the ranks along `shard` hold one copy of the state together, those along `data` hold the same.
Gradients are summed, never averaged: the loss is already divided by the step's targets over all ranks.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from glm_accelerate.models.linear import Linear
from glm_accelerate.parallel.part import as_part, local_of
from glm_accelerate.parallel.table import CutTable

# Layers cast for themselves, so weights are gathered as they are kept, but those of `gather_narrow`.
AS_KEPT = MixedPrecisionPolicy(cast_forward_inputs=False)


def shard(model: nn.Module, blocks: Sequence[nn.Module], entries: Sequence[str], mesh: DeviceMesh) -> None:
    """In place. `entries`: the methods through which the model is run besides `forward`."""
    units = [*_units(blocks), [model]]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=AS_KEPT)
    for unit, *_ in units:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
    for entry in entries:
        register_fsdp_forward_method(model, entry)


def _units(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Neighbours that have a weight in common are gathered together."""
    units: list[list[nn.Module]] = []
    for block in blocks:
        if units and not set(units[-1][0].parameters()).isdisjoint(block.parameters()):
            units[-1].append(block)
        else:
            units.append([block])
    return units


def fill(
    model: nn.Module,
    read: Callable[[str, Sequence[int], Sequence[int]], Tensor],
    device: torch.device,
    table: CutTable,
) -> None:
    """Give a model that was divided on the device `meta` its weights: each rank reads its own part alone.

    FSDP takes up new parameters when the model first runs.
    """
    made: dict[Tensor, nn.Parameter] = {}  # one that has two names stays one
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta:
            continue
        if parameter not in made:
            local = torch.empty(local_of(parameter).shape, dtype=parameter.dtype, device=device)
            if local.numel():
                local.copy_(table.read(name, parameter, partial(read, name)))
            made[parameter] = nn.Parameter(as_part(local, parameter), parameter.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[parameter])


class NarrowPart(Tensor):
    """This rank's part of a float32 weight that travels in bfloat16, by FSDP's protocol for such tensors."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor], None]:
        """What is sent: as many rows from every rank."""
        rows = -(-shape[0] // mesh.size())
        sent = torch.zeros((rows, *shape[1:]), dtype=torch.bfloat16, device=self.device)
        sent[: len(self)].copy_(self.as_subclass(Tensor))
        return (sent,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight is what was gathered. `out` lies in the same memory already."""
        return None if out is not None else (gathered[0], ())


def gather_narrow(model: nn.Module) -> None:
    """Trained float32 weights that are only ever multiplied in bfloat16 are gathered in it; their gradients
    stay float32. So numbers are those of one process. A collective: all are gathered once.
    """
    owners = Counter(weight for part in model.modules() for weight in part.parameters(recurse=False))
    layers = [part for part in model.modules() if isinstance(part, Linear) and part.plain]
    layers = [each for each in layers if owners[each.weight] == 1 and _trains_wide(each.weight)]
    for layer in layers:
        weight: Any = layer.weight
        weight._local_tensor = local_of(layer.weight.detach()).as_subclass(NarrowPart)
    for unit in _units_of(model):
        unit.unshard()
        for layer in layers:
            if not isinstance(layer.weight, DTensor):
                layer.weight.grad_dtype = torch.float32  # FSDP keeps this parameter, and gathers into it
        unit.reshard()


def _trains_wide(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.requires_grad and weight.dtype == torch.float32


def keep_gathered(model: nn.Module, zero: int) -> Callable[[bool], None]:
    """What to call before each backward pass, and whether it is the step's last. With ZeRO-3 weights are
    gathered for each pass; with 2 and 1 they stay until the last; with 1 gradients are summed only then.
    """
    if not isinstance(model, FSDPModule) or zero == 3:
        return lambda last: None
    for unit in _units_of(model):
        unit.set_reshard_after_forward(False, recurse=False)

    def before(last: bool) -> None:
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last or zero == 2)

    return before


def _units_of(model: nn.Module) -> list[FSDPModule]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(unit: nn.Module) -> Generator[None, None, None]:
    """Its weights are whole on every rank while this is entered, by all ranks."""
    if isinstance(unit, FSDPModule):
        unit.unshard()
    yield
    free(unit)


def free(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward one has gathered."""
    for unit in _units_of(model):
        unit.reshard()
