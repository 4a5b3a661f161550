"""What of offload, smaller optimizers and updates within the backward pass cannot go together, by name."""

from collections.abc import Collection

from glm_accelerate.runtime.errors import UserError


def refuse(
    *,
    offload: Collection[str],
    fuse_update: bool,
    optimizer: str,
    limit: float,
    method: str,
    compute: str,
    ranks: int,
    shards: int,
) -> None:
    """Before anything is loaded. `limit`: of the norm of all gradients, 0 for none."""
    if fuse_update:
        _refuse_fused(limit, compute, ranks)
        if "optimizer" in offload:
            raise UserError(
                "memory.offload=[optimizer] and memory.fuse_update both take gradients as they are made",
                cure="memory.fuse_update=off",
            )
    if "optimizer" in offload and ranks > 1:
        raise UserError(
            "memory.offload=[optimizer] is for one process",
            cure="parallel.shard=full instead, which divides the moments over ranks",
        )
    if "optimizer" in offload and compute == "float16":
        raise UserError(
            "memory.offload=[optimizer] cannot go with precision.compute=float16",
            cure="precision.compute=bfloat16",
        )
    if "weights" in offload and method == "full":
        raise UserError(
            "memory.offload=[weights] moves frozen weights, and adapt.method=full has none",
            cure="memory.offload=[optimizer], or adapt.method=lora",
        )
    if "weights" in offload and shards > 1:
        raise UserError("memory.offload=[weights] cannot go with parallel.shard", cure="one of the two")
    if optimizer in ("adamw8bit", "adafactor") and shards > 1:
        raise UserError(
            f"optim.name={optimizer} cannot go with parallel.shard",
            cure="parallel.shard=off, or optim.name=adamw, whose moments are divided over ranks",
        )


def _refuse_fused(limit: float, compute: str, ranks: int) -> None:
    off = "memory.fuse_update=off"
    if limit > 0:
        what = f"optim.clip={limit:g} needs the norm of all gradients before the first update"
        raise UserError(
            f"{what}, memory.fuse_update has one at a time",
            cure=f"optim.clip=0 (optim.name=adafactor limits every update by itself), or {off}",
        )
    if compute == "float16":
        raise UserError(
            "precision.compute=float16 overflows now and then, memory.fuse_update cannot take a step back",
            cure=f"precision.compute=bfloat16, or {off}",
        )
    if ranks > 1:
        raise UserError("memory.fuse_update is for one process", cure=off)
