"""A run's largest passes before its first step: found, gone through as they will be trained, forgotten."""

from torch.optim import Optimizer

from glm_accelerate.data.largest import find_largest, largest_steps
from glm_accelerate.data.types import Step
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.memory.static import make_moments, rehearse
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.observe.events import Events
from glm_accelerate.optim.fused_backward import FusedBackward
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.parallel.shard import free
from glm_accelerate.plan.resolve import order_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.seed import repeating
from glm_accelerate.train.settle import Settled
from glm_accelerate.train.state import Progress
from glm_accelerate.train.step import forward_backward


def rehearsal(
    settled: Settled,
    model: Decoder,
    optimizer: Optimizer,
    progress: Progress,
    events: Events,
    fused: FusedBackward | None,
) -> None:
    """What does not fit is a user's error now, instead of one of the machine's in some hours."""
    config, plan, ranks, train = settled.config, settled.plan, settled.ranks, settled.inputs.train
    device = model.embed.device
    ranks.doing.phase = "rehearsing"
    found = find_largest(
        order_of(settled.inputs, config, plan.step_samples),
        train.targets,
        batching=config.data.batching,
        micro_tokens=plan.micro_tokens,
        position=progress.position,
        total=plan.steps,
        ranks=ranks.count,
    )

    def gradients(step: Step) -> None:
        if fused is not None:
            fused.sound = False  # gradients are let go as they come, and move nothing
        together, offload = ranks.count > 1, "activations" in plan.offload
        forward_backward(model, step, device, together=together, offload=offload)

    def through(step: Step) -> None:
        said = repeating(lambda: gradients(step))
        if said is not None:
            events.emit("warning", {"said": said})

    try:
        make_moments(optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        cure = "optim.name=adamw8bit, memory.offload=[optimizer], or adapt.method=lora"
        raise UserError("out of memory: the optimizer's moments do not fit", cure=cure) from error
    done = rehearse(largest_steps(train, found), optimizer, through, device)
    free(model)
    of = f" (of steps up to {found.looked_at:,})" if found.looked_at < plan.steps else ""
    events.emit("decision", {"step": progress.position, "said": f"{done.said}{of}"})
    ranks.doing.phase = "training"
