"""Meshes of many ranks, on a process group that sends nothing: what first, middle and last rank hold."""

from dataclasses import replace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import parameter_bytes
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks
from tests.distributed.one_process import GLM4, divide, model_of

MESHES = {
    128: (Axes(pipeline=4, data=2, shard=4, tensor=2, query=2, context=4), (2, 2, 2, 1)),
    1024: (Axes(pipeline=8, data=4, shard=8, tensor=2, query=2, context=16), (1,) * 8),
}
# Of each kind of layer: in how many parts, along which dimension.
DIVIDED = {"q_proj": (4, 0), "gate_up_proj": (4, 0), "o_proj": (4, 1), "down_proj": (4, 1)}
DIVIDED |= {"k_proj": (2, 0), "v_proj": (2, 0), "embed": (4, 0), "head": (4, 0)}


def hold(_: int, ranks: int) -> None:
    axes, layers = MESHES[ranks]
    sizes = replace(GLM4, layers=sum(layers))
    job = Job(
        sizes.part(4), method="full", base="float32", compute="float32", shards=axes.shard, stages=layers
    )
    whole = {name: tuple(each.shape) for name, each in model_of(sizes, "full").named_parameters()}
    for rank in (0, ranks // 2, ranks - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        place = Place(Ranks(rank, ranks), axes)
        model = model_of(sizes, "full")
        table = divide(model, place, layers)
        neighbours = next(iter(model.layers)).self_attn.sharing.group
        assert dist.get_world_size(neighbours) == axes.context
        assert dist.get_rank(neighbours) == place.samples[0] % axes.context
        stage = place.index("pipeline")
        first = sum(layers[:stage])
        inside = [f"layers.{number}." for number in range(first, first + layers[stage])]
        ends = (["embed"] if stage == 0 else []) + (["norm.", "head."] if stage == len(layers) - 1 else [])
        assert list(table.weights) == [name for name in whole if name.startswith((*inside, *ends))]
        held = 0
        for name, weight in table.weights.items():
            part = table.part(name, weight)
            parts, dim = DIVIDED.get(
                name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2], (1, 0)
            )
            shape = [size // parts if number == dim else size for number, size in enumerate(whole[name])]
            chunk = -(-shape[0] // axes.shard)  # as FSDP divides rows
            shape[0] = max(0, min(chunk, shape[0] - chunk * place.index("shard")))
            assert (part.shape, tuple(part.local.shape)) == (whole[name], tuple(shape)), name
            held += part.local.numel()
        if place.index("shard") == 0:
            assert parameter_bytes(job.of_stages()[stage]) == 4 * held
        dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.parametrize("ranks", MESHES)
def test_many_ranks_hold_what_is_theirs(ranks: int) -> None:
    mp.start_processes(hold, args=(ranks,), nprocs=1, start_method="forkserver")
