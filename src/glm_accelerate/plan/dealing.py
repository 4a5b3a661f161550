"""By what a run's samples are dealt to ranks, as far as it follows from the config and the model."""

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import BY_TOKENS, Dealing
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import Trained, attended_flops, product_flops
from glm_accelerate.plan.step_time import ATTENDING


def dealing_of(config: RunConfig, sizes: Sizes) -> Dealing:
    """As reckoned, every token a target: no clock is asked, so the same command always deals the same."""
    how, adapt = config.parallel.balance, config.adapt
    if how == "tokens":
        return BY_TOKENS
    trained = Trained(adapt.method, adapt.layers, adapt.prefix_tokens if adapt.method == "prefix" else 0)
    squares = attended_flops(sizes, trained, 1) / 2 / ATTENDING  # a document's pairs are half its square
    square = squares / product_flops(sizes, trained, 1, 1)
    return Dealing(float(f"{square:.3g}"), moves=how == "measured")
