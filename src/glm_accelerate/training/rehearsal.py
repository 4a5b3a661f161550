"""Before the first step: how much blocks recompute, and whether the run's largest passes fit."""

from typing import Any

import torch

from glm_accelerate.data.largest import find_largest, largest_steps
from glm_accelerate.data.pack import Dealing, pieces_of
from glm_accelerate.data.types import Step
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.memory.job import matter
from glm_accelerate.memory.measure import measure_all
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.memory.recompute import apply, choose, cost, plan_from_json
from glm_accelerate.memory.static import rehearse
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.place import ORDER, Place
from glm_accelerate.parallel.shard import free, gathered
from glm_accelerate.plan.resolve import order_of
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.seed import repeating
from glm_accelerate.training.life import Life
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.step import ForwardBackward

CAUTION = 0.9  # of the room that is left over: what is measured and what is estimated are not one


def recompute_as_needed(model: Decoder, plan: RunPlan, place: Place) -> str | None:
    """Where a run fits only if blocks recompute, but not all of them need to: the cheapest way that fits.
    Returns what a person should know of it; None: all or nothing is recomputed, as planned.
    """
    if not plan.recompute or not plan.spare_bytes:
        return None
    together = plan.shards > 1 and not model.sizes.plain
    if together or plan.offload or model.prefix is not None or plan.compute == "float16":
        # Blocks that cannot be measured alone; in float16 what is between them changes their inputs.
        return None
    # Ranks that share products or documents measure together, their exchanges among it, and recompute the
    # same; stages have blocks of their own.
    first_of_stage = place.along(*(name for name in ORDER if name != "pipeline"))[0]
    chosen = place.ranks.gather(_cheapest(model, plan, place))[first_of_stage]
    model.recompute = False
    apply(list(model.layers), plan_from_json(chosen["plan"]))
    return chosen["said"]


def _cheapest(model: Decoder, plan: RunPlan, place: Place) -> dict[str, Any]:
    """Measured by one pass of the largest size through the first block of each kind. A stage of a pipeline
    has several passes at work at once, which share what is left over.
    """
    spare = plan.spare_bytes // (place.count("pipeline") - place.index("pipeline"))
    device, blocks = model.embed.device, list(model.layers)
    training, recompute = model.training, model.recompute
    model.train()
    model.recompute = False
    layout = _largest_layout(plan, place, device)
    table = rope_table(layout.positions_BT, model.sizes.rope_width, model.sizes.rope_theta)
    shape = (1, model.tokens_here(plan.micro_tokens), model.sizes.width)
    x_BTH = torch.randn(shape, dtype=model.compute or model.embed.dtype, device=device)
    x_BTH.requires_grad_(model.embed.requires_grad)
    chain = measure_all(blocks, x_BTH, layout, table, None, None, around=gathered)
    model.train(training)
    model.recompute = recompute
    inputs_alone = ((),) * len(blocks)
    all_of_it = cost(chain, inputs_alone)
    chosen = choose(chain, all_of_it.peak + int(CAUTION * spare)) or inputs_alone
    seconds = cost(chain, chosen).seconds
    share = f"{seconds / all_of_it.seconds:.0%}" if all_of_it.seconds else "all"
    return {"plan": chosen, "said": f"blocks recompute {share} of their work: more fits in memory"}


def _largest_layout(plan: RunPlan, place: Place, device: torch.device) -> Layout:
    """A document that fills a pass, or the pieces of one that fills those of all ranks that share it."""
    if plan.context == 1:
        return Layout.of_documents([(plan.micro_tokens,)], device)
    whole = plan.micro_tokens * plan.context
    pieces = pieces_of(0, whole, plan.context, place.index("context"))
    return Layout.of_documents([tuple(map(len, pieces))], device, pieces)


def rehearsal(
    settled: Settled,
    life: Life,
    model: Decoder,
    passes: ForwardBackward,
    mover: Mover,
    position: int,
    dealing: Dealing,
) -> None:
    """Run the largest passes as they will be trained, and forget them. What does not fit is a user's error
    now, instead of one of the machine's in some hours.
    """
    config, plan, train = settled.config, settled.plan, settled.inputs.train
    life.ranks.doing.phase = "rehearsing"
    largest = find_largest(
        order_of(settled.inputs, config, plan.step_samples),
        train.targets,
        batching=config.data.batching,
        micro_tokens=plan.micro_tokens,
        position=position,
        total=plan.steps,
        ranks=life.place.samples[1],
        matter=matter(len(plan.stages)),
        context=plan.context,
        dealing=dealing,
    )

    def through(step: Step) -> None:
        mover.discard_next()
        warning = repeating(lambda: passes(step))
        if warning is not None:
            life.warn(warning)

    try:
        mover.make_moments()
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        cure = "optim.name=adamw8bit, memory.offload=[optimizer], or adapt.method=lora"
        raise UserError("out of memory: the optimizer's moments do not fit", cure=cure) from error
    fits = rehearse(largest_steps(train, largest), mover.optimizer, through, model.embed.device)
    free(model)
    of = f" (of steps up to {largest.looked_at:,})" if largest.looked_at < plan.steps else ""
    life.events.emit("decision", {"step": position, "said": f"{fits}{of}"})
    life.ranks.doing.phase = "training"
