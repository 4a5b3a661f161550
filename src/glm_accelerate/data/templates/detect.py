"""Which template a model was trained with, from the files beside it. Nothing of the model's code is run."""

import json
from pathlib import Path
from typing import Any

from glm_accelerate.runtime.errors import UserError

_CHOOSE = "set data.template to chatglm2, chatglm3, glm4 or glm4-0414"


def detect_template(model_dir: Path) -> str:
    """The name of the template; UserError where the files do not say."""
    config = _json(model_dir / "config.json", missing="has no config.json")
    if isinstance(inside := config.get("model"), dict):  # a compressed model: the plain one's
        config = inside
    kind = config.get("model_type")
    own = chat_template(model_dir) or ""
    if "<think>" in own or "</think>" in own:
        what = "the model's chat template thinks before it answers, which is not supported"
        raise UserError(what, where=model_dir, cure=_CHOOSE)
    if kind == "glm4":
        return "glm4-0414"
    if kind == "glm" and (own or not (model_dir / "tokenization_chatglm.py").is_file()):
        return "glm4"
    if kind in ("glm", "chatglm"):  # a ChatGLM that was converted to `glm` keeps its tokenizer
        return _chatglm(model_dir, config)
    raise UserError(
        f"no template is known for model_type {kind!r}", where=model_dir / "config.json", cure=_CHOOSE
    )


def chat_template(model_dir: Path) -> str | None:
    """The model's own template in Jinja, from either place where it may be."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json(model_dir / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((item.get("template") for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _chatglm(model_dir: Path, config: dict[str, Any]) -> str:
    """ChatGLM2, ChatGLM3 and GLM-4-9B share a model type: vocabulary and role tokens tell them apart."""
    if int(config.get("padded_vocab_size") or config.get("vocab_size") or 0) > 100_000:
        return "glm4"
    code = model_dir / "tokenization_chatglm.py"
    if code.is_file():
        return "chatglm3" if "<|observation|>" in code.read_text(encoding="utf-8") else "chatglm2"
    if "<|user|>" in json.dumps(_json(model_dir / "tokenizer_config.json"), ensure_ascii=False):
        return "chatglm3"
    name = f"{config.get('_name_or_path', '')} {model_dir.name}".lower()
    for family in ("chatglm2", "chatglm3"):
        if family in name:
            return family
    raise UserError(
        "the files do not say whether this is ChatGLM2 or ChatGLM3", where=model_dir, cure=_CHOOSE
    )


def _json(path: Path, missing: str | None = None) -> dict[str, Any]:
    if not path.is_file():
        if missing is None:
            return {}
        raise UserError(missing, where=path.parent, cure="name a model directory in Hugging Face form")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", where=path, cure="fetch the file again") from error
    if not isinstance(content, dict):
        raise UserError("is not a JSON object", where=path, cure="fetch the file again")
    return content
