"""How each family writes a conversation; one file a family."""

from glm_accelerate.data.templates.chatglm2 import chatglm2
from glm_accelerate.data.templates.chatglm3 import chatglm3
from glm_accelerate.data.templates.detect import detect_template
from glm_accelerate.data.templates.glm4 import glm4
from glm_accelerate.data.templates.glm4_0414 import glm4_0414
from glm_accelerate.data.templates.template import Template
from glm_accelerate.runtime.errors import UserError

__all__ = ["Template", "detect_template", "get_template"]


def get_template(name: str) -> Template:
    """By the name that a config or `detect_template` gives."""
    families = {"chatglm2": chatglm2, "chatglm3": chatglm3, "glm4": glm4, "glm4-0414": glm4_0414}
    if name not in families:
        raise UserError(f"no template is called {name!r}", cure=f"one of {', '.join(families)}")
    return families[name]()
