"""A run's largest passes before its first step: found, gone through as they will be trained, forgotten."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.optim import Optimizer

from glm_accelerate.data.largest import find_largest, largest_steps, shape_steps
from glm_accelerate.data.types import Step
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.memory.static import make_moments, rehearse, shapes_worth
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
    # One block stands for all where blocks are called alike, and none waits for another rank's.
    alike = model.prefix is None and plan.shards == 1 and not plan.offload
    found = find_largest(
        order_of(settled.inputs, config, plan.step_samples),
        train.targets,
        batching=config.data.batching,
        micro_tokens=plan.micro_tokens,
        position=progress.position,
        total=plan.steps,
        ranks=ranks.count,
        shapes=shapes_worth(plan.steps - progress.position, device) if alike else 0,
    )

    def gradients(step: Step) -> None:
        if fused is not None:
            fused.sound = False  # gradients are let go as they come, and move nothing
        together, offload = ranks.count > 1, "activations" in plan.offload
        forward_backward(model, step, device, together=together, offload=offload)

    try:
        make_moments(optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        cure = "optim.name=adamw8bit, memory.offload=[optimizer], or adapt.method=lora"
        raise UserError("out of memory: the optimizer's moments do not fit", cure=cure) from error
    largest, shapes = largest_steps(train, found), shape_steps(train, found)
    passes = [*largest, *shapes, *(largest if shapes else ())]  # the largest again, beside what shapes leave

    def through(step: Step) -> None:
        with _last_block_alone(model) if any(step is one for one in shapes) else nullcontext():
            said = repeating(lambda: gradients(step))
        if said is not None:
            events.emit("warning", {"said": said})

    done = rehearse(passes, optimizer, through, device)
    free(model)
    of = f" (of steps up to {found.looked_at:,})" if found.looked_at < plan.steps else ""
    events.emit("decision", {"step": progress.position, "said": f"{done.said}{of}"})
    ranks.doing.phase = "training"


@contextmanager
def _last_block_alone(model: Decoder) -> Generator[None, None, None]:
    """What a shape leaves behind is the same for every block."""
    whole = model.layers
    model.layers = nn.ModuleList([whole[-1]])
    try:
        yield
    finally:
        model.layers = whole
