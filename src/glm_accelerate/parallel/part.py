"""The part of a tensor that this rank holds, by its position in the whole: what is saved, and loaded."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of a tensor. `owned`: of all ranks that hold the same, this one saves it."""

    local: Tensor
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    owned: bool = True
    rows: tuple[tuple[int, int], ...] = ()  # of the whole, if they are not all next to each other


def part_of(tensor: Tensor) -> Part:
    """This rank's part of what FSDP divides; anything else is whole."""
    if not isinstance(tensor, DTensor):
        return Part(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    offset, owned = [0] * tensor.ndim, True
    for placement, coordinate, size in zip(
        tensor.placements, coordinates, tensor.device_mesh.shape, strict=True
    ):
        if isinstance(placement, Shard):
            whole = tensor.shape[placement.dim]
            offset[placement.dim] = min(whole, -(-whole // size) * coordinate)  # as torch.chunk divides
        else:
            assert placement.is_replicate(), f"{placement} is not a state to save"
            owned = owned and coordinate == 0
    local = tensor.to_local()
    return Part(local, tuple(tensor.shape), tuple(offset), owned and local.numel() > 0)


def as_part(local: Tensor, pattern: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is divided like `pattern`."""
    if not isinstance(pattern, DTensor):
        return local
    return DTensor.from_local(
        local,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. A collective, where it is divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
