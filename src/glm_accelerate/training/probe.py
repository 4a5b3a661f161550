"""The child of plan/probe.py: opens a run's files, makes a model of its widths with fewer blocks and
any numbers, and takes its largest pass and smaller ones. Prints the most memory of the process, and seconds.
For a run of several ranks it does so in as many copies of itself at the same time, as the ranks will be.
"""

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.assemble.model import complete
from glm_accelerate.assemble.recipe import ModelFiles, Recipe
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.memory.job import Job
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import Family
from glm_accelerate.models.locate import locate
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.models.weights import read_config
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.parallel.launch import LIBRARIES, can_fork
from glm_accelerate.plan.probe import FEW, Answer
from glm_accelerate.prove.inputs import prove_inputs
from glm_accelerate.runtime.child import end_with_parent
from glm_accelerate.runtime.host import (
    give_back_memory,
    keep_freed_memory,
    peak_resident,
    reset_peak_resident,
)
from glm_accelerate.training.build import Built
from glm_accelerate.training.step import WholeModel, train_step

# Of the largest pass, the share of its tokens and of its targets. Smaller ones leave the holes in the heap
# that they leave in a run.
WHOLE, HALF, FEWER = (1.0, 1.0), (0.5, 0.5), (1.0, FEW)
PASSES = (WHOLE, HALF, (0.75, 0.75), WHOLE, HALF, FEWER)
DEVICE = torch.device("cpu")
IMPORTED = Built  # of a run: for the memory that all its modules take


def main() -> None:
    asked = json.load(sys.stdin)
    together = asked["together"]
    if together == 1 or not can_fork():
        _answer(asked, None)
        return
    for name in LIBRARIES:
        import_module(name)
    context = get_context("fork")
    pass_begins = context.Barrier(together)
    copies = [
        context.Process(target=_copy, args=(asked, number, pass_begins), daemon=True)
        for number in range(together)
    ]
    for copy in copies:
        copy.start()
    while copies:
        wait([copy.sentinel for copy in copies])
        if any(copy.exitcode for copy in copies):
            sys.exit(1)  # which ends the others
        copies = [copy for copy in copies if copy.exitcode is None]


def _copy(asked: dict[str, Any], number: int, pass_begins: Barrier) -> None:
    """One of several; the first of them answers."""
    end_with_parent()
    if number:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _answer(asked, pass_begins)
    sys.stdout.flush()


def _answer(asked: dict[str, Any], pass_begins: Barrier | None) -> None:
    torch.manual_seed(0)
    config, job = RunConfig.model_validate(asked["config"]), _job(asked["job"])
    directory = locate(config.model.path)
    family, _, _ = read_config(directory)
    inputs = open_inputs(config.data, directory, check=False)  # whoever asks has looked
    keep_freed_memory()
    model = _model(config, job, family)
    optimizer = build_optimizer(model.named_parameters(), config.optim, native=model.form == "native")
    keep_copies(optimizer, model)
    passes, mover = WholeModel(model, DEVICE), mover_of(optimizer, clip=config.optim.clip)
    prove_inputs(config, inputs, directory)
    give_back_memory()
    reset_peak_resident()
    mover.make_moments()
    took: defaultdict[tuple[float, float], list[float]] = defaultdict(list)
    for shares in PASSES:
        step = _step(job, *shares)
        if pass_begins is not None:
            pass_begins.wait()
        began = time.perf_counter()
        train_step(passes, mover, step, 0.0)
        took[shares].append(time.perf_counter() - began)
    answer = Answer(
        1 if pass_begins is None else pass_begins.parties,
        peak_resident(),
        min(took[WHOLE]),
        min(took[HALF]),
        min(took[FEWER]),
        took[WHOLE][0],
    )
    sys.stdout.write(json.dumps(asdict(answer)))


def _job(fields: dict[str, Any]) -> Job:
    """The job that was given as JSON."""
    adapted = fields["adapted"] and tuple(fields["adapted"])
    named: dict[str, Any] = {
        **fields,
        "sizes": Sizes(**fields["sizes"]),
        "offload": frozenset(),
        "adapted": adapted,
    }
    return Job(**named)


def _model(config: RunConfig, job: Job, family: Family) -> Decoder:
    """A model as training builds one, but without random weights."""
    plain = job.rest if job.base in ("nf4", "int8", "fp8") else job.base
    with torch.device("meta"):
        model = Decoder(job.sizes, Origin(family.name, {}, ""))
    dtype: torch.dtype = getattr(torch, "float32" if job.method == "full" else plain)
    model = model.to(dtype).to_empty(device=DEVICE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01 if weight.ndim > 1 else 1.0)
    if job.sizes.tied:
        model.head.weight = model.embed
    recipe = Recipe(
        ModelFiles(Path(config.model.path)),
        config.adapt,
        config.train.seed,
        compute=getattr(torch, job.compute),
        recompute=job.recompute != "off",
        compiled=job.form in ("native", "compiled"),
    )
    complete(model, recipe, DEVICE)
    return model.train()


def _step(job: Job, tokens_share: float, learnt_share: float) -> Step:
    """Passes of so much of the largest: documents of one length, the last tokens of them are learnt."""
    tokens = max(1, round(job.pass_tokens * tokens_share) // 64) * 64
    learnt, longest = max(1, round(job.learnt * learnt_share)), min(job.longest, tokens)
    tokens_RT = torch.arange(tokens).remainder(job.sizes.vocabulary)[None].numpy()
    labels_RT = tokens_RT.copy()
    labels_RT[:, : tokens - learnt] = IGNORED
    whole, rest = divmod(tokens, longest)
    documents = ((longest,) * whole + ((rest,) if rest else ()),)
    batch = Batch(tokens_RT, labels_RT, documents, len(documents[0]), tokens, learnt)
    return Step(1, 0, (batch,) * job.passes, (), job.passes * tokens, job.passes * learnt)
