"""A small model in float64, steps of uneven passes, and the question whether a divided one does the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm_accelerate.assemble.tensors import trained
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.context import share_documents
from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.pipeline import keep_stage
from glm_accelerate.parallel.place import SINGLE, TENSOR, Place
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.parallel.shard import shard
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.parallel.tensor import cut_model
from glm_accelerate.training.step import forward_backward_of, train_step

CPU, STEPS = torch.device("cpu"), 3
GLM4 = Sizes(96, 32, 48, 2, 8, 2, 8, 1e-5, 1e4, 4, True, 512, sandwich=True)
MODELS = {
    "glm4": GLM4,
    "chatglm": replace(GLM4, sandwich=False, fused_qkv=True),
    "plain": replace(GLM4, sandwich=False, tied=True),
}
DOCUMENTS: tuple[tuple[tuple[int, ...], ...], ...] = (  # rows of each batch
    ((33, 31), (1, 62, 1)),
    ((5, 40, 19), (64,)),
    ((24,),),
    ((7, 9), (16,), (2, 14)),
)
NOTHING = dict[Tensor, Tensor]()


def joined(rank: int, ranks: int, folder: Path) -> Ranks:
    """This process as one of so many, that meet in a folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return Ranks(rank, ranks, store)


def model_of(sizes: Sizes, method: str, dropout: float = 0.0) -> Decoder:
    """`method` may be a packed base, which LoRA trains on."""
    torch.manual_seed(0)
    model = Decoder(sizes, Origin("glm4", {}, ""))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = model.double()
    if sizes.tied:
        model.head.weight = model.embed
    base = method if method in ("nf4", "int8", "fp8") else "auto"
    section = AdaptSection(
        method="lora" if base == method else method,  # pyright: ignore[reportArgumentType]
        dropout=dropout,
        base=base,
        prefix_tokens=3,
        layers=1,
    )
    adapt(model, section, 0)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "prefix" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
    bind_operators(model)
    return model.train()


def batch_of(number: int) -> Batch:
    """Documents of uneven lengths with uneven numbers of targets; the third has hardly any."""
    documents = DOCUMENTS[number]
    shape = (len(documents), sum(documents[0]))
    random = np.random.default_rng(number)
    tokens = random.integers(0, 96, shape)
    labels = np.where(random.random(shape) < (0.2, 0.5, 0.05, 0.9)[number], tokens, IGNORED)
    targets = int((labels != IGNORED).sum())
    return Batch(tokens, labels, documents, 5, tokens.size, targets)


def step_of(number: int, share: int = 0, of: int = 1) -> Step:
    batches = [batch_of(each) for each in range(len(DOCUMENTS))]
    targets = sum(batch.targets for batch in batches)
    return Step(number, 0, tuple(batches[share::of]), (), sum(each.tokens for each in batches), targets)


def steps_of(place: Place, count: int = STEPS) -> list[Step]:
    """This rank's part of some steps."""
    return [step_of(number, *place.samples) for number in range(1, count + 1)]


def divide(model: Decoder, place: Place, layers: Sequence[int] = ()) -> CutTable:
    """In place, over every axis that the place has. `layers`: of each stage."""
    cuts = cut_model(model, place) if place.count(*TENSOR) > 1 else {}
    if layers:
        cuts = keep_stage(model, place, layers, CPU, cuts)
    if place.axes.context > 1:
        share_documents(model, place)
    table = CutTable(place=place, cuts=cuts)
    if place.axes.shard > 1:
        shard(model, list(model.layers), ["hidden"], place.mesh(CPU))
    return replace(table, weights=trained(model))


class Watched(Mover):
    """Keeps the gradients of its first step, summed and not yet clipped."""

    first: dict[Tensor, Tensor]

    def move(self, norm: Tensor, scale: float = 1.0) -> None:
        if self.first is NOTHING:
            self.first = {
                weight: weight.grad.clone() for weight in self._weights() if weight.grad is not None
            }
        super().move(norm, scale)


def trace(
    model: Decoder, table: CutTable, place: Place, data: Sequence[Step], zero: int = 3
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the first step by name, and loss and norm of each; the model has made all steps then."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    mover = Watched(torch.optim.AdamW([{"params": weights}], lr=1e-2, foreach=False), table, clip=0.5)
    mover.first, passes = NOTHING, forward_backward_of(model, CPU, place, zero=zero)
    steps = [train_step(passes, mover, step, 1e-2, place=place) for step in data]
    gradients = {name: mover.first[weight] for name, weight in trained(model).items()}
    return gradients, torch.tensor([(step.loss, step.grad_norm) for step in steps])


@cache
def of_one(
    sizes: Sizes, method: str, data: Callable[[Place], Sequence[Step]]
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Gradients, loss and norm of each step, and the weights in the end: the first rank tells the others."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        model = model_of(sizes, method)
        weights = trained(model)
        gradients, numbers = trace(model, CutTable(weights), SINGLE, data(SINGLE))
        told = [(gradients, numbers, {name: weight.detach() for name, weight in weights.items()})]
    dist.broadcast_object_list(told, 0)
    return told[0]


def same_as_one(
    place: Place,
    sizes: Sizes,
    method: str,
    what: str,
    layers: Sequence[int] = (),
    data: Callable[[Place], Sequence[Step]] = steps_of,
    recompute: bool = False,
    zero: int = 3,
) -> None:
    """Loss and norm of each step, every gradient of the first, and the weights after the last."""
    expected, numbers, weights = of_one(sizes, method, data)
    model = model_of(sizes, method)
    table = divide(model, place, layers)
    model.recompute = recompute
    gradients, found = trace(model, table, place, data(place), zero)
    torch.testing.assert_close(
        found,
        numbers,
        rtol=1e-6,  # a loss is summed in float32
        atol=0,
        msg=lambda text: f"{what}: {text}",
    )
    everywhere = {name for names in place.ranks.gather(list(gradients)) for name in names}
    assert everywhere == expected.keys()
    for name, weight in trained(model).items():
        for have, whole in ((gradients[name], expected[name]), (weight.detach(), weights[name])):
            wanted = table.restore(name, weight, reader(whole))
            torch.testing.assert_close(
                local_of(have).detach(),
                local_of(wanted),
                rtol=1e-7,
                atol=1e-10,
                msg=lambda text, name=name: f"{what}, {name}: {text}",
            )


def reader(whole: Tensor) -> Callable[..., Tensor]:
    """Of a part of a tensor, by offset and shape."""
    return lambda offset, size: whole[
        tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))
    ].clone()
