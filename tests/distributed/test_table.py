"""A model that is cut by hand beneath FSDP: sums, the norm, saving and loading follow from its table."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from glm_accelerate.assemble.tensors import put
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import WEIGHTS
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.parallel.shard import shard
from glm_accelerate.parallel.table import Cut, CutTable
from glm_accelerate.training.state import restore, resume_tensors

RANKS = 4
TENSOR, WIDTH, HALF = ("tensor",), 6, 10
CPU = torch.device("cpu")
LAYOUTS = {"data": Axes(data=2, tensor=2), "shard": Axes(shard=2, tensor=2)}
WHOLE_SHAPES = {"up": (2 * HALF, WIDTH), "down": (WIDTH, HALF), "norm": (WIDTH,), "rank_a": (2, HALF)}


class Mlp(nn.Module):
    """Parameters alone: pairs of rows (gate and up), columns, one with partial gradients."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, scale: Tensor) -> Tensor:
        return sum(((parameter * scale).sum() for parameter in self.parameters()), torch.zeros(()))


def whole_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in WHOLE_SHAPES.items()}


def cuts(index: int) -> dict[str, Cut]:
    low, high = HALF // 2 * index, HALF // 2 * (index + 1)
    return {
        "up": Cut(0, 2 * HALF, ((low, high), (HALF + low, HALF + high)), TENSOR),
        "down": Cut(1, HALF, ((low, high),), TENSOR),
        "norm": Cut(partial=TENSOR),
        "rank_a": Cut(1, HALF, ((low, high),), TENSOR),
    }


def cut(tensor: Tensor, how: Cut) -> Tensor:
    if not how.intervals:
        return tensor
    return torch.cat([tensor.narrow(how.dim, start, stop - start) for start, stop in how.intervals], how.dim)


def one_rank(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for name, axes in LAYOUTS.items():
        step_and_save(Place(Ranks(rank, RANKS, store), axes), folder / name)
    leave(store, RANKS)


def step_and_save(place: Place, run: Path) -> None:
    how, whole = cuts(place.index("tensor")), whole_tensors(0)
    model = Mlp({key: cut(tensor, how[key]) for key, tensor in whole.items()})
    if place.axes.shard > 1:
        shard(model, [], [], place.mesh(CPU))
    table = CutTable(dict(model.named_parameters()), place, how)
    mover = mover_of(torch.optim.AdamW(model.parameters(), lr=1e-2), table, clip=1.0)
    mine, _ = place.samples
    mover.begin(1e-2)
    model(torch.tensor(float(mine + 1))).backward()  # of each sample another gradient: together 3
    mover.sum_gradients()
    norm = mover.norm()
    expected = whole_gradients()
    exact = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    torch.testing.assert_close(float(norm), float(exact))
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        read = table.restore(key, parameter, lambda at, size, key=key: box(expected[key], at, size))
        assert torch.equal(torch.as_tensor(local(gradient)), local(read)), key
    mover.move(norm)
    mover.end()
    saver = Checkpointer(run, rank=place.ranks.rank, ranks=RANKS, run_id="0" * 32)
    saver.save(Save(1, 1, resume_tensors(mover), {}, {}, {}), wait=True)
    (outcome,) = saver.close()
    assert outcome.error is None, outcome.error
    dist.barrier()
    (path,) = published(run)
    again = Mlp({key: torch.zeros_like(cut(whole[key], how[key])) for key in whole})
    if place.axes.shard > 1:
        shard(again, [], [], place.mesh(CPU))
    table = CutTable(dict(again.named_parameters()), place, how)
    other = mover_of(torch.optim.AdamW(again.parameters(), lr=1e-2), table)
    restore(Reader(path), again, other, path)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(local(one), local(two))
        for moment, value in mover.optimizer.state[one].items():
            assert torch.equal(local(value), local(other.optimizer.state[two][moment])), moment


def whole_gradients() -> dict[str, Tensor]:
    """3, of both samples; of what is partial, over two ranks along `tensor` each of which has all of it."""
    return {name: torch.full(shape, 6.0 if name == "norm" else 3.0) for name, shape in WHOLE_SHAPES.items()}


def box(whole: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return whole[tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))].clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def test_two_axes_are_one_process(tmp_path: Path) -> None:
    """Each rank holds what the table says, and what they save together is one whole model, at any layout."""
    found: list[dict[str, Tensor]] = []
    mp.start_processes(one_rank, args=(tmp_path,), nprocs=RANKS, start_method="forkserver")
    for name in LAYOUTS:
        (path,) = published(tmp_path / name)
        found.append(Reader(path).group(WEIGHTS))
    expected = Mlp(whole_tensors(0))
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for key, parameter in expected.named_parameters():
        parameter.grad = whole_gradients()[key]
    mover = mover_of(optimizer, clip=1.0)
    mover.begin(1e-2)
    mover.move(mover.norm())
    for weights in found:
        assert weights.keys() == WHOLE_SHAPES.keys()
        for key, parameter in expected.named_parameters():
            torch.testing.assert_close(weights[key], parameter.detach())
    one = Mlp(whole_tensors(1))
    (path,) = published(tmp_path / "shard")
    put(one, Reader(path), path)
    assert all(torch.equal(parameter, found[1][key]) for key, parameter in one.named_parameters())
