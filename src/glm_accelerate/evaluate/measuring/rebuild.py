"""A run's model and exam, built again from its config.yaml and plan.json in a process of its own.

The base is read as the trainer reads it (quantised, merged); a snapshot's tensors go on top.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch

from glm_accelerate.assemble.model import assemble
from glm_accelerate.assemble.recipe import ModelFiles, evaluation_recipe
from glm_accelerate.assemble.tensors import put
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.made_with import made_with, require_made_with
from glm_accelerate.checkpoint.origin import begun_on
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_held_out
from glm_accelerate.evaluate.measuring.exam import exam_of
from glm_accelerate.evaluate.measuring.examine import GlmExaminer
from glm_accelerate.models.locate import locate
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError


def glm_examiner(
    run: Path, device: torch.device | str, ranks: Ranks = ALONE, base: Path | None = None
) -> GlmExaminer:
    """An examiner ready for the run's requests. Several ranks divide the model if the run does, otherwise the
    samples. `base`: where the run's model is now, if it has moved.
    """
    config, plan = config_and_plan(run)
    directory = locate(str(base or config.model.path))
    if not config.data.dev:
        raise UserError("the run has no held-out data", where=run / "config.yaml", cure="--data FILE.jsonl")
    if not plan.evaluate_samples:
        cure = "go on training with data.dev, or name the samples: --data FILE.jsonl"
        raise UserError("the run was planned without held-out data", where=run / "plan.json", cure=cure)
    inputs = open_held_out(config.data, directory)
    device = torch.device(device)
    fingerprints = ranks.decide(lambda: _fingerprints(run, config, directory))
    files = ModelFiles(directory, begun_on(run))
    place = Place(ranks, Axes(shard=ranks.count) if plan.divided else Axes(data=ranks.count))
    recipe = evaluation_recipe(config, plan, files, device, place.axes.shard > 1)
    assembled = assemble(recipe, device, place)
    model = assembled.model

    def load(path: Path) -> None:
        reader = Reader(path)
        require_made_with(reader, fingerprints)
        put(model, reader, path, assembled.table)

    return GlmExaminer(
        exam_of(config, plan, inputs),
        model,
        load,
        place,
        by={"device": str(device), "dtype": str(model.compute).removeprefix("torch.")},
        check=model.compute != torch.float32,
    )


def config_and_plan(run: Path) -> tuple[RunConfig, RunPlan]:
    """The config of a run, and its plan."""
    for name in ("config.yaml", "plan.json"):
        if not (run / name).is_file():
            raise UserError(f"no {name} here: no run, or one that has not begun", where=run)
    try:
        plan = RunPlan.from_json(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        cure = "run its train command again: that makes it anew"
        raise UserError(f"damaged: {error}", where=run / "plan.json", cure=cure) from error
    return load_config(run / "config.yaml"), plan


def _fingerprints(run: Path, config: RunConfig, directory: Path) -> dict[str, str]:
    """What the model that is built here is made of. The run's newest weights are checked at once: an
    evaluator with another base ends before it claims a request.
    """
    fingerprints = made_with(directory, config.adapt, begun_on(run))
    for path in [*published(run, "snapshot"), *published(run)]:
        with suppress(Damaged):
            reader = Reader(path)
            require_made_with(reader, fingerprints)
            break
    return fingerprints
