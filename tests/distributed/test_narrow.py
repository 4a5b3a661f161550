"""Float32 weights gathered in bfloat16 give, to the last bit, what they give gathered as they are kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm_accelerate.data.types import Step
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.parallel.shard import free, gather_narrow
from tests.distributed.one_process import DOCUMENTS, GLM4, MODELS, divide, joined, model_of, steps_of, trace

ODD = replace(GLM4, mlp_width=50, vocabulary=97)  # rows that three and four ranks divide unevenly
LAYOUTS: dict[int, tuple[tuple[Axes, tuple[int, ...]], ...]] = {
    2: ((Axes(shard=2), ()),),
    3: ((Axes(shard=3), ()),),
    4: (
        (Axes(data=2, shard=2), ()),
        (Axes(tensor=2, shard=2), ()),
        (Axes(pipeline=2, shard=2), (1, 1)),
    ),
}


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    here = joined(rank, ranks, folder)
    for axes, layers in LAYOUTS[ranks]:
        place = Place(here, axes)
        odd = ODD if axes.tensor == 1 else GLM4
        for sizes, method, zero in ((odd, "full", 3), (odd, "freeze", 3), (MODELS["plain"], "full", 1)):
            same(place, sizes, method, layers, zero, f"{axes}, {method}, ZeRO-{zero}")
    assert here.store is not None
    leave(here.store, ranks)


def same(place: Place, sizes: Sizes, method: str, layers: Sequence[int], zero: int, what: str) -> None:
    """Loss, gradients, norms and weights of some steps, gathered both ways."""
    found = [run(place, sizes, method, layers, zero, narrow) for narrow in (False, True)]
    for name, wide in found[0].items():
        torch.testing.assert_close(found[1][name], wide, rtol=0, atol=0, msg=f"{what}: {name}")
    assert found[0].keys() == found[1].keys()


def run(
    place: Place, sizes: Sizes, method: str, layers: Sequence[int], zero: int, narrow: bool
) -> dict[str, Tensor]:
    model = model_of(sizes, method).float()
    if sizes.tied:
        model.head.weight = model.embed
    compute_in(model, torch.bfloat16)
    table = divide(model, place, layers)
    if narrow:
        gather_narrow(model)
        table = replace(table, weights={n: p for n, p in model.named_parameters() if p.requires_grad})
    gathered_in(model, sizes, narrow)
    gradients, norms = trace(model, table, place, as_many_passes(place), zero)
    free(model)
    weights = {f"weight of {name}": whole(p.detach()) for name, p in model.named_parameters()}
    sums = {f"gradient of {name}": whole(each) for name, each in gradients.items()}
    return {"loss and norm": norms, **weights, **sums}


def as_many_passes(place: Place) -> list[Step]:
    """Steps that have as many passes on each rank: three ranks leave the fourth batch out."""
    passes = len(DOCUMENTS) // place.samples[1]
    return [replace(step, batches=step.batches[:passes]) for step in steps_of(place)]


def gathered_in(model: Decoder, sizes: Sizes, narrow: bool) -> None:
    """Matrices travel in bfloat16, the rest as it is kept."""
    for block in model.layers:
        block.unshard()  # pyright: ignore[reportCallIssue]
        down, norm = block.mlp.down_proj.weight, block.input_layernorm.weight  # pyright: ignore
        assert not isinstance(down, DTensor)
        assert (down.dtype == torch.bfloat16) == (narrow and down.requires_grad), down.dtype
        assert norm.dtype == torch.float32
        block.reshard()  # pyright: ignore[reportCallIssue]


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_in_bfloat16_change_no_number(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="forkserver")
