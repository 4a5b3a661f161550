"""A model divided over ranks by FSDP2, from outside: each block is a unit, the rest is the root's.

replicas x shards: every shard group holds one copy of the state, replicas hold the same shards.
Gradients are summed, never averaged: the loss is already divided by the step's targets over all ranks.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

# Layers cast for themselves, so weights are gathered as they are kept: the same numbers at any N.
AS_KEPT = MixedPrecisionPolicy(cast_forward_inputs=False)


def make_mesh(device: torch.device, ranks: int, shards: int) -> DeviceMesh:
    """replicas x shards, shards next to each other."""
    assert ranks % shards == 0, f"{ranks} ranks don't divide into groups of {shards}"
    return init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, blocks: Sequence[nn.Module], entries: Sequence[str], mesh: DeviceMesh) -> None:
    """In place. `entries`: the methods through which the model is run besides `forward`."""
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=AS_KEPT)
    for unit in (*blocks, model):
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
    for entry in entries:
        register_fsdp_forward_method(model, entry)


def free(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward one has gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()
