"""How each family writes a conversation; one file a generation."""

from glm_accelerate.data.templates.chatglm import CHATGLM2, CHATGLM3
from glm_accelerate.data.templates.detect import detect_template
from glm_accelerate.data.templates.glm4 import GLM4, GLM4_0414
from glm_accelerate.data.templates.template import Template
from glm_accelerate.runtime.errors import UserError

__all__ = ["Template", "detect_template", "get_template"]

TEMPLATES = {template.name: template for template in (CHATGLM2, CHATGLM3, GLM4, GLM4_0414)}


def get_template(name: str) -> Template:
    """By the name that a config or `detect_template` gives."""
    if name not in TEMPLATES:
        raise UserError(f"no template is called {name!r}", cure=f"one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
