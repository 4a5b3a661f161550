"""Where a run fits only if blocks recompute, but not all of them need to: the cheapest plan that fits, from
what one block of this model takes on this device.
"""

from typing import Any

import torch

from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.memory.measure import measure_all
from glm_accelerate.memory.recompute import apply, choose, cost, plan_from_json
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.plan.run_plan import RunPlan

CAUTION = 0.9  # of the room that is left over: what is measured and what is estimated are not one


def recompute_as_needed(model: Decoder, plan: RunPlan, ranks: Ranks) -> str | None:
    """Put the plan on the model's blocks; what to say of it. None: the model does as it is told."""
    if not plan.recompute or not plan.spare_bytes:
        return None
    if plan.shards > 1 or plan.offload or model.prefix is not None or plan.compute == "float16":
        # Blocks that cannot be measured alone; in float16 what is between them changes their inputs.
        return None
    found = ranks.decide(lambda: _found(model, plan))
    model.recompute = False
    apply(list(model.layers), plan_from_json(found["plan"]))
    return found["said"]


def _found(model: Decoder, plan: RunPlan) -> dict[str, Any]:
    """By one pass of the largest size through the first block of each kind."""
    device, blocks = model.embed.device, list(model.layers)
    training, recompute = model.training, model.recompute
    model.train()
    model.recompute = False
    layout = Layout.of_documents([(plan.micro_tokens,)], device)
    table = rope_table(layout.positions_BT, model.sizes.rope_width, model.sizes.rope_theta)
    shape = (1, plan.micro_tokens, model.sizes.width)
    x_BTH = torch.randn(shape, dtype=model.compute or model.embed.dtype, device=device)
    x_BTH.requires_grad_(model.embed.requires_grad)
    chain = measure_all(blocks, x_BTH, layout, table, None, None)
    model.train(training)
    model.recompute = recompute
    inputs_alone = ((),) * len(blocks)
    all_of_it = cost(chain, inputs_alone)
    chosen = choose(chain, all_of_it.peak + int(CAUTION * plan.spare_bytes)) or inputs_alone
    seconds = cost(chain, chosen).seconds
    share = f"{seconds / all_of_it.seconds:.0%}" if all_of_it.seconds else "all"
    return {"plan": chosen, "said": f"blocks recompute {share} of their work: more fits in memory"}
