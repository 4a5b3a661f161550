"""Every family of checkpoints that can be read, by the `model_type` of its config.json."""

from typing import Any

from glm_accelerate.models.families.chatglm import CHATGLM
from glm_accelerate.models.families.family import Family
from glm_accelerate.models.families.glm import GLM, GLM4
from glm_accelerate.runtime.errors import UserError

FAMILIES = {family.name: family for family in (CHATGLM, GLM, GLM4)}

__all__ = ["FAMILIES", "Family", "family_of"]


def family_of(config: dict[str, Any], where: object) -> Family:
    """The family that a config.json names; a UserError lists the choices."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"model_type {name!r} is not a GLM that can be trained here",
            where=where,
            cure=f"one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]
