"""A run's model and exam once more, in another process than the trainer's: from config.yaml and plan.json.

The base is read as the trainer reads it (quantised, merged, restructured); a snapshot's tensors come on top.
"""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import WEIGHTS, Damaged, step_of
from glm_accelerate.checkpoint.load import begun_on, load_base
from glm_accelerate.checkpoint.made_with import made_with, require_made_with
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.evaluate.examine import GlmExaminer, exam_of
from glm_accelerate.evaluate.results import SNAPSHOTS
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.quantized import kind_of
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import part_reader
from glm_accelerate.optim.widen import wide_dtype
from glm_accelerate.parallel.part import part_of
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.parallel.shard import fill, free, make_mesh, shard
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
    model = _model(run, config, plan, directory, place, ranks if divided else ALONE)

    def load(path: Path) -> None:
        require_made_with(Reader(path), now)
        put(model, path, ranks)

    return GlmExaminer(
        exam_of(config, plan, inputs),
        model,
        load,
        ranks=ranks,
        divided=divided,
        by={"device": str(place), "dtype": str(model.compute).removeprefix("torch.")},
        check=model.compute != torch.float32,
    )


@torch.no_grad()
def put(model: Decoder, snapshot: Path, ranks: Ranks = ALONE) -> None:
    """A snapshot's tensors into the model, verified; each rank reads its own part alone."""
    reader = Reader(snapshot)
    free(model)  # first: what an evaluation before has gathered are other parameters, of other weights
    places = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if odd := sorted(places.keys() ^ set(reader.names(WEIGHTS))):
        raise UserError(f"trains other tensors than this config, as {odd[0]}", where=snapshot)
    for name, parameter in places.items():
        if (shape := reader.shapes(WEIGHTS)[name]) != tuple(parameter.shape):
            said = f"{name} is {list(shape)}, this config wants {list(parameter.shape)}"
            raise UserError(said, where=snapshot)
        part = part_of(parameter, ranks)
        part.local.copy_(reader.tensor(WEIGHTS, name, part.offset, part.local.shape))


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


def _model(
    run: Path, config: RunConfig, plan: RunPlan, directory: Path, device: torch.device, ranks: Ranks
) -> Decoder:
    """Divided over these ranks, if there are several: then a rank reads its own part alone, unless the whole
    is needed to merge or factor it.
    """
    divided, restructures = ranks.count > 1, config.adapt.restructures
    left = _left_by(run) if restructures else None  # its shapes spare factoring the base once more
    shapes = None if left is None else left.shapes(WEIGHTS)
    begun = begun_on(run)
    whole = restructures or begun is not None
    first = device if not divided else torch.device("cpu" if whole else "meta")
    quantized = kind_of(config.adapt)
    dtype: torch.dtype = getattr(torch, config.model.dtype if quantized else plan.dtype)
    model = load_base(begun, directory, dtype=dtype, device=first, quantized=quantized)
    adapt(model, config.adapt, config.train.seed, shapes=shapes)
    if divided:
        shard(model, list(model.layers), ["hidden"], make_mesh(device, ranks.count, ranks.count))
        if first.type == "meta":
            fill(model, part_reader(model), device, ranks)
    model.compute = compute_of(config, plan, device)
    bind_operators(model, compiled=plan.compile and not divided)
    for part in model.modules() if model.form == "native" else ():
        if type(part) is Linear and part.weight.dtype != model.compute:  # else cast again in every pass
            part.keep_copy(model.compute)
    return model


def compute_of(config: RunConfig, plan: RunPlan, device: torch.device) -> torch.dtype:
    """As training does, unless the config says otherwise. 8-bit products are trained in, not evaluated; nor
    is float16: which layers it cannot hold only the trainer has measured.
    """
    said = plan.compute if config.evaluate.precision == "auto" else config.evaluate.precision
    if said == "float16":
        return wide_dtype(device)
    return torch.bfloat16 if said == "fp8" else getattr(torch, said)


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
