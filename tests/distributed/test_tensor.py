"""A model divided over the tensor axis is one process: loss, every gradient, their norm, steps of weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from glm_accelerate.assemble.tensors import trained
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.place import SINGLE, Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.parallel.shard import shard
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.parallel.tensor import cut_model
from glm_accelerate.training.step import WholeModel, train_step

CPU, STEPS = torch.device("cpu"), 3
GLM4 = Sizes(96, 32, 48, 2, 8, 2, 8, 1e-5, 1e4, 4, True, 512, sandwich=True)
MODELS = {
    "glm4": GLM4,
    "chatglm": replace(GLM4, sandwich=False, fused_qkv=True),
    "plain": replace(GLM4, sandwich=False, tied=True),
}
NOTHING = dict[Tensor, Tensor]()
LAYOUTS = {
    "tensor 2": Axes(tensor=2),
    "tensor 4, two for each key head": Axes(tensor=2, query=2),
    "data 2, tensor 2": Axes(data=2, tensor=2),
    "shard 2, tensor 2": Axes(shard=2, tensor=2),
    "shard 2, two for one key head": Axes(shard=2, query=2),
}


def model_of(sizes: Sizes, method: str, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(sizes, Origin("glm4", {}, ""))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = model.double()
    if sizes.tied:
        model.head.weight = model.embed
    section = AdaptSection(method=method, dropout=dropout)  # pyright: ignore[reportArgumentType]
    adapt(model, section, 0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
    bind_operators(model)
    return model.train()


def batch_of(seed: int) -> Batch:
    """Rows of documents of uneven lengths, with uneven numbers of targets."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 96, (2, 64))
    labels = np.where(random.random((2, 64)) < 0.2 + 0.3 * seed, tokens, IGNORED)
    documents = ((5, 40, 19), (64,)) if seed else ((33, 31), (1, 62, 1))
    targets = int((labels != IGNORED).sum())
    return Batch(tokens, labels, documents, 5, 128, targets)


def step_of(number: int, share: int = 0, of: int = 1) -> Step:
    batches = [batch_of(seed) for seed in range(2)]
    targets = sum(batch.targets for batch in batches)
    return Step(number, 0, tuple(batches[share::of]), (), 256, targets)


class Watched(Mover):
    """Keeps the gradients of its first step, summed and not yet clipped."""

    first: dict[Tensor, Tensor]

    def move(self, norm: Tensor, scale: float = 1.0) -> None:
        if self.first is NOTHING:
            self.first = {
                weight: weight.grad.clone() for weight in self._weights() if weight.grad is not None
            }
        super().move(norm, scale)


def trace(model: Decoder, table: CutTable, place: Place) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the first step by name, and loss and norm of each; the model has made all steps then."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    mover = Watched(torch.optim.AdamW(weights, lr=1e-2, foreach=False), table, clip=0.5)
    mover.first, passes = NOTHING, WholeModel(model, CPU, place)
    steps = [
        train_step(passes, mover, step_of(number, *place.samples), 1e-2, place=place)
        for number in range(1, STEPS + 1)
    ]
    gradients = {name: mover.first[weight] for name, weight in trained(model).items()}
    return gradients, torch.tensor([(step.loss, step.grad_norm) for step in steps])


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for layout, axes in LAYOUTS.items():
        if axes.count(*axes.sizes) != ranks:
            continue
        for family, sizes in MODELS.items():
            for method in ("full", "lora"):
                if axes.query > 1 and sizes.fused_qkv:
                    continue
                if axes.query > axes.tensor:
                    sizes = replace(sizes, kv_heads=1)
                check(Place(Ranks(rank, ranks, store), axes), sizes, method, f"{layout}, {family}, {method}")
    drop(Place(Ranks(rank, ranks, store), Axes(tensor=2, data=ranks // 2)))
    leave(store, ranks)


def drop(place: Place) -> None:
    """Ranks drop the same of an input that all have, other inputs of a layer that each has some of, and draw
    alike again after it.
    """
    model = model_of(GLM4, "lora", dropout=0.5)
    cut_model(model, place)
    attention = model.layers[0].self_attn
    torch.manual_seed(7)
    for layer, alike in ((attention.q_proj, True), (attention.o_proj, False), (attention.v_proj, True)):
        layer.bias = None
        nn.init.zeros_(layer.weight)
        layer.lora_A.data = (2.0 ** -torch.arange(layer.inputs)).expand(8, -1).contiguous().double()
        nn.init.ones_(layer.lora_B)
        kept = layer(torch.ones(1, 1, layer.inputs, dtype=torch.float64)).flatten()[:1].detach()
        other = kept.clone()
        place.sum_(other, "tensor")
        assert bool((other == 2 * kept).all()) == alike


def check(place: Place, sizes: Sizes, method: str, what: str) -> None:
    one = model_of(sizes, method)
    expected, numbers = trace(one, CutTable(trained(one)), SINGLE)
    model = model_of(sizes, method)
    table = CutTable(place=place, cuts=cut_model(model, place))
    if place.axes.shard > 1:
        shard(model, list(model.layers), ["hidden"], place.mesh(CPU))
    table = replace(table, weights=trained(model))
    gradients, found = trace(model, table, place)
    torch.testing.assert_close(
        found,
        numbers,
        rtol=1e-6,  # a loss is summed in float32
        atol=0,
        msg=lambda text: f"{what}: {text}",
    )
    assert gradients.keys() == expected.keys()
    weights = trained(one)
    for name, weight in trained(model).items():
        for have, whole in ((gradients[name], expected[name]), (weight.detach(), weights[name].detach())):
            wanted = table.restore(name, weight, reader(whole))
            torch.testing.assert_close(
                local(have),
                local(wanted),
                rtol=1e-7,
                atol=1e-10,
                msg=lambda text, name=name: f"{what}, {name}: {text}",
            )


def reader(whole: Tensor) -> Callable[..., Tensor]:
    return lambda offset, size: whole[
        tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))
    ].clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_block_is_one_process(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="forkserver")
