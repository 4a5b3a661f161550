"""What moves the weights of a run: the optimizer by its config, where the plan has it, and in which form."""

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import Mover, mover_of
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.plan.run_plan import RunPlan


def build_mover(
    config: RunConfig, plan: RunPlan, model: Decoder, table: CutTable, device: torch.device
) -> Mover:
    """If the plan has the optimizer on the host, weights come to the device from there, and narrower."""
    named, clip = table.weights.items(), config.optim.clip
    if "optimizer" not in plan.offload:
        optimizer = build_optimizer(named, config.optim, native=model.form == "native")
        return mover_of(optimizer, table, clip, fused=table.weights.values() if plan.fuse_update else None)
    native = native_library() is None
    optimizer = build_optimizer(named, config.optim, native=native, host=device, compute=model.compute)
    model.to(device)
    bind_operators(model, compiled=plan.compile)
    return mover_of(optimizer, table, clip)
