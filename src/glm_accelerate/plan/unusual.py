"""What may be meant, but hardly is: said before the first step."""

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.models.sizes import Sizes

HIGHEST_USUAL_RATE = 0.1


def unusual(config: RunConfig, sizes: Sizes, longest: int) -> list[str]:
    """One line for each. `longest`: tokens of the longest sample."""
    said: list[str] = []
    rate = config.optim.learning_rate
    if rate > HIGHEST_USUAL_RATE:
        said.append(f"optim.learning_rate is {rate:g}: usual are 1e-5 to 1e-2, and far higher ones diverge")
    if longest > sizes.max_positions:
        made = f"the model was made for {sizes.max_positions:,} positions"
        said.append(f"the longest sample has {longest:,} tokens, and {made} (data.max_tokens)")
    return said
