"""`glm4`: GLM-4-0414 and GLM-Z1, which norm what each branch returns."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glm_accelerate.models.families.family import Family
from glm_accelerate.models.families.glm import INNER, OUTER
from glm_accelerate.models.families.glm import read as read_glm
from glm_accelerate.models.sizes import Sizes


def read(config: Mapping[str, Any]) -> Sizes:
    """As `glm`, with the norms that make a sandwich."""
    return replace(read_glm(config), sandwich=True)


SANDWICH = {name: name for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}

GLM4 = Family(name="glm4", read=read, layer_prefix="model.layers.{N}", outer=OUTER, inner=INNER | SANDWICH)
