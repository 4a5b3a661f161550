"""A random model that takes real steps (`train.step.update`), and the most bytes of tensors alive in one.

On a CPU every allocation of torch's allocator, those of C++ extensions included, is an event of torch's
profiler; what tensors borrow from numpy is added at its own time. On CUDA the allocator counts.
"""

import json
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from glm_accelerate.assemble.model import complete
from glm_accelerate.assemble.recipe import ModelFiles, Recipe
from glm_accelerate.assemble.tensors import trained
from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.data.pack import pieces_of
from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.memory.job import Job
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import FusedMover, mover_of
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.parallel.launch import launch
from glm_accelerate.parallel.place import SINGLE, Axes, Place
from glm_accelerate.parallel.ranks import joined
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.runtime.errors import ExitCode
from glm_accelerate.training.step import forward_backward_of, train_step

STEPS = 2  # moments are made in the first


@dataclass(frozen=True)
class Task:
    """A job to run for real. It travels to every rank."""

    job: Job
    sizes: Sizes  # of the whole model, of which the job may have a part
    folder: str


def measure(job: Job, folder: Path, whole: Sizes | None = None) -> int:
    """The most bytes of tensors in a step, of the rank that has the most. `whole`: the model's sizes, where
    ranks share every product.
    """
    task = Task(job, whole or job.sizes, str(folder))
    if job.processes == 1:
        return _most(task, SINGLE)
    code = launch(_rank, task, job.processes, lambda: 0, ExitCode.USERS_INPUT)
    assert code == 0, f"{job.processes} ranks ended with exit code {code}"
    return max(json.loads((folder / f"{rank}.json").read_text()) for rank in range(job.processes))


def _rank(task: Task) -> int:
    with joined() as ranks:
        job = task.job
        copies = job.ranks // job.shards
        axes = Axes(data=copies, shard=job.shards, context=job.context, tensor=job.tensor)
        (Path(task.folder) / f"{ranks.rank}.json").write_text(json.dumps(_most(task, Place(ranks, axes))))
    return 0


def _most(task: Task, place: Place) -> int:
    job, device = task.job, torch.device(task.job.device)
    if job.device == "cuda":
        model, optimizer = _build(task, device, place)
        _step(job, model, optimizer, device, place)
        torch.cuda.reset_peak_memory_stats(device)
        _step(job, model, optimizer, device, place)
        return torch.cuda.max_memory_allocated(device)
    with borrowed() as loans, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model, optimizer = _build(task, device, place)
        _step(job, model, optimizer, device, place)
        begin = time.time_ns()
        _step(job, model, optimizer, device, place)
    return most_between(allocations(seen) + loans, begin)


@dataclass(frozen=True, slots=True)
class Change:
    """Memory taken, or given back where `size` is negative."""

    moment: int
    place: int
    size: int


def allocations(seen: Any) -> list[Change]:
    """Every allocation but those within a collective: gloo's own copies, which its threads free unseen."""
    changes: list[Change] = []
    events: list[tuple[Any, bool]] = [
        (event, False) for event in seen.profiler.kineto_results.experimental_event_tree()
    ]
    while events:
        event, inside = events.pop()
        if event.tag.name == "Allocation" and not inside:
            fields = event.extra_fields
            changes.append(Change(event.start_time_ns, fields.ptr, fields.alloc_size))
        events.extend((child, inside or event.name.startswith("c10d::")) for child in event.children)
    return changes


def most_between(changes: list[Change], begin: int) -> int:
    """The most bytes alive at a moment from `begin` on."""
    alive: dict[int, int] = {}
    total = most = 0
    for change in sorted(changes, key=lambda change: change.moment):
        total -= alive.pop(change.place, 0)  # freed now, or unseen before its place was taken again
        if change.size > 0:
            alive[change.place] = change.size
            total += change.size
        if change.moment >= begin:
            most = max(most, total)
    return most


@contextmanager
def borrowed() -> Generator[list[Change]]:
    """The memory of numpy that tensors are made of meanwhile."""
    changes: list[Change] = []
    real = torch.from_numpy

    def note(place: int, size: int) -> None:
        changes.append(Change(time.time_ns(), place, size))

    def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
        place = -1 - len(changes)  # of its own: numpy may take the same address again
        note(place, array.nbytes)
        weakref.finalize(array, note, place, -array.nbytes)
        return real(array)

    torch.from_numpy = from_numpy
    try:
        yield changes
    finally:
        torch.from_numpy = real


def _build(task: Task, device: torch.device, place: Place) -> tuple[Decoder, Optimizer]:
    """As `train.build` does it, with random weights."""
    job = task.job
    torch.manual_seed(0)
    base = "float32" if job.method == "full" else job.rest if job.base in ("nf4", "int8", "fp8") else job.base
    with torch.device("meta"):
        model = Decoder(task.sizes, Origin("chatglm" if job.sizes.fused_qkv else "glm4", {}, ""))
    away = "optimizer" in job.offload  # whose weights come to the device from the host
    model = model.to(getattr(torch, base)).to_empty(device="cpu" if away else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    if job.sizes.tied:
        model.head.weight = model.embed
    recipe = Recipe(
        ModelFiles(Path()),
        _section(job),
        compute=getattr(torch, job.compute),
        recompute=job.recompute == "blocks",
        compiled=job.form in ("native", "compiled"),
        gather_narrow=job.compute == "bfloat16",
    )
    complete(model, recipe, device, place)
    section = OptimSection(name=job.optimizer)  # pyright: ignore[reportArgumentType]
    optimizer = build_optimizer(
        model.named_parameters(),
        section,
        native=model.form == "native" or (away and native_library() is None),
        host=device if away else None,
        compute=model.compute if away else None,
    )
    if away:
        model.to(device)
        bind_operators(model, compiled=recipe.compiled)
    keep_copies(optimizer, model)
    assert model.form == job.form, f"{model.form} here, {job.form} was asked for"
    return model.train(), optimizer


def _section(job: Job) -> AdaptSection:
    targets = "all-linear" if job.adapted is None else list(job.adapted)
    section = {
        "method": job.method,
        "rank": job.rank,
        "dropout": job.dropout,
        "targets": targets,
        "base": job.base if job.base in ("nf4", "int8", "fp8") else "auto",
        "layers": job.last,
        "prefix_tokens": job.prefix_tokens,
    }
    return AdaptSection.model_validate(section)


def _step(job: Job, model: Decoder, optimizer: Optimizer, device: torch.device, place: Place) -> None:
    batches = tuple(_batch(job, place) for _ in range(job.passes))
    targets = job.learnt * job.passes * job.ranks
    step = Step(1, 0, batches, (), job.pass_tokens * job.passes, targets)
    away = "activations" in job.offload
    passes = forward_backward_of(model, device, place, offload=away, zero=job.zero)
    table = CutTable(trained(model), place)
    fused = model.parameters() if job.fuse_update else None
    mover = mover_of(optimizer, table, 0.0 if job.fuse_update else 1.0, fused)
    outcome = train_step(passes, mover, step, 1e-4, place=place)
    if isinstance(mover, FusedMover):
        mover.close()
    assert outcome.applied


def _batch(job: Job, place: Place) -> Batch:
    """Documents of one length in one row, the last `learnt` tokens of which are learnt; or this rank's pieces
    of one document.
    """
    random = np.random.default_rng(0)
    tokens_RT = random.integers(0, job.sizes.vocabulary, (1, job.pass_tokens))
    labels_RT = np.roll(tokens_RT, -1, 1)
    labels_RT[:, : job.pass_tokens - job.learnt] = IGNORED
    if job.context > 1:
        pieces = pieces_of(0, job.longest, job.context, place.samples[0] % job.context)
        lengths = tuple(map(len, pieces))
        assert sum(lengths) == job.pass_tokens
        return Batch(tokens_RT, labels_RT, (lengths,), 1, job.pass_tokens, job.learnt, pieces)
    whole, rest = divmod(job.pass_tokens, job.longest)
    lengths = (job.longest,) * whole + ((rest,) if rest else ())
    return Batch(tokens_RT, labels_RT, (lengths,), len(lengths), job.pass_tokens, job.learnt)
