"""A run's model and exam once more, in another process than the trainer's: from config.yaml and plan.json.

The base is read as the trainer reads it (quantised, merged, restructured); a snapshot's tensors come on top.
"""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from glm_accelerate.assemble.model import assemble
from glm_accelerate.assemble.recipe import ModelFiles, evaluation_recipe
from glm_accelerate.assemble.tensors import put
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import WEIGHTS, Damaged, step_of
from glm_accelerate.checkpoint.made_with import made_with, require_made_with
from glm_accelerate.checkpoint.origin import begun_on
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, exam_of
from glm_accelerate.evaluate.protocol.messages import SNAPSHOTS
from glm_accelerate.models.locate import locate
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError


def glm_examiner(
    run: Path, device: torch.device | str, ranks: Ranks = ALONE, base: Path | None = None
) -> GlmExaminer:
    """Ready for the run's requests. Several ranks divide the model, if the run does, and else the samples.
    `base`: where the run's model is now, if it has moved.
    """
    config, plan = said_of(run)
    directory = locate(str(base or config.model.path))
    if not config.data.dev:
        raise UserError("the run has no held-out data", where=run / "config.yaml", cure="data.dev")
    if not plan.evaluate_samples:
        cure = "go on training with data.dev, or name the samples: --data FILE.jsonl"
        raise UserError("the run was planned without held-out data", where=run / "plan.json", cure=cure)
    # What is trained on need not be here.
    held_out = open_inputs(config.data.model_copy(update={"train": config.data.dev, "dev": None}), directory)
    inputs = replace(held_out, dev=held_out.train)
    place = torch.device(device)
    divided = ranks.count > 1 and plan.shards > 1
    now = ranks.decide(lambda: _made_with(run, config, directory))
    left = _left_by(run) if config.adapt.restructures else None  # its shapes spare factoring the base again
    files = ModelFiles(directory, begun_on(run), shapes=None if left is None else left.shapes(WEIGHTS))
    recipe = evaluation_recipe(config, plan, files, place, ranks.count if divided else 1)
    model, _ = assemble(recipe, place, ranks if divided else ALONE)

    def load(path: Path) -> None:
        reader = Reader(path)
        require_made_with(reader, now)
        put(model, reader, path, ranks)

    return GlmExaminer(
        exam_of(config, plan, inputs),
        model,
        load,
        ranks=ranks,
        divided=divided,
        by={"device": str(place), "dtype": str(model.compute).removeprefix("torch.")},
        check=model.compute != torch.float32,
    )


def said_of(run: Path) -> tuple[RunConfig, RunPlan]:
    """What a run was told, and what followed."""
    for name in ("config.yaml", "plan.json"):
        if not (run / name).is_file():
            raise UserError(f"no {name} here: no run, or one that has not begun", where=run)
    try:
        plan = RunPlan.from_json(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        cure = "run its train command again: that makes it anew"
        raise UserError(f"damaged: {error}", where=run / "plan.json", cure=cure) from error
    return load_config(run / "config.yaml"), plan


def _made_with(run: Path, config: RunConfig, directory: Path) -> dict[str, str]:
    """What is built here. What the run has left so far is asked at once: an evaluator with another base ends
    before it claims anything.
    """
    now = made_with(directory, config.adapt, begun_on(run))
    if (reader := _left_by(run)) is not None:
        require_made_with(reader, now)
    return now


def _left_by(run: Path) -> Reader | None:
    """Weights of the run, where it has left any yet."""
    folder = run / SNAPSHOTS
    there = [path for path in folder.glob("snapshot-*") if step_of(path.name, "snapshot") is not None]
    for path in [*there, *published(run)]:
        with suppress(Damaged):
            return Reader(path)
    return None
