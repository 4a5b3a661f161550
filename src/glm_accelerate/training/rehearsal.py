"""A run's largest passes before its first step: found, gone through as they will be trained, forgotten."""

from glm_accelerate.data.largest import find_largest, largest_steps
from glm_accelerate.data.types import Step
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.memory.static import rehearse
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.shard import free
from glm_accelerate.plan.resolve import order_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.seed import repeating
from glm_accelerate.training.life import Life
from glm_accelerate.training.passes import ForwardBackward
from glm_accelerate.training.settle import Settled


def rehearsal(
    settled: Settled, life: Life, model: Decoder, passes: ForwardBackward, mover: Mover, position: int
) -> None:
    """What does not fit is a user's error now, instead of one of the machine's in some hours."""
    config, plan, train = settled.config, settled.plan, settled.inputs.train
    life.ranks.doing.phase = "rehearsing"
    found = find_largest(
        order_of(settled.inputs, config, plan.step_samples),
        train.targets,
        batching=config.data.batching,
        micro_tokens=plan.micro_tokens,
        position=position,
        total=plan.steps,
        ranks=life.place.samples[1],
    )

    def through(step: Step) -> None:
        mover.discard_next()
        warning = repeating(lambda: passes(step))
        if warning is not None:
            life.events.emit("warning", {"said": warning})

    try:
        mover.make_moments()
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        cure = "optim.name=adamw8bit, memory.offload=[optimizer], or adapt.method=lora"
        raise UserError("out of memory: the optimizer's moments do not fit", cure=cure) from error
    fits = rehearse(largest_steps(train, found), mover.optimizer, through, model.embed.device)
    free(model)
    of = f" (of steps up to {found.looked_at:,})" if found.looked_at < plan.steps else ""
    life.events.emit("decision", {"step": position, "said": f"{fits}{of}"})
    life.ranks.doing.phase = "training"
