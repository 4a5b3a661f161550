"""From a run, a checkpoint or an adapter to a directory that other programs open.

whole model    weights, config.json, generation_config.json, tokenizer files        transformers, vLLM, SGLang
adapter        adapter_model.safetensors, adapter_config.json, tokenizer files      PEFT; the base stays apart
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from glm_accelerate.assemble.model import Opened, dtype_of, open_model
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.export.compress import expand
from glm_accelerate.export.directory import (
    TOKENIZER_FILES,
    code_files,
    copy_files,
    new_directory,
    require_free,
)
from glm_accelerate.models.adapt import adapted_layers, merge
from glm_accelerate.models.adapter_files import save_adapter
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.write import save_model
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. `missing` are code files that the model's configs name and its directory lacks."""

    kind: Literal["model", "adapter", "prefix"]
    path: Path
    step: int | None
    missing: tuple[str, ...]


def export(
    source: Path,
    out: Path,
    *,
    merge_adapter: bool,
    layout: Literal["hf", "original", "structured"] = "hf",
    dtype: torch.dtype | None = None,
    base: Path | None = None,
    change: Callable[[Decoder], Decoder] | None = None,
) -> Exported:
    """Writes `out`. `dtype` of the weights: as the base model's config says, unless given. `change`: what is
    done to a whole model before; by default a compressed one is written as a plain one, unless `layout` is
    "structured", which this program alone reads.
    """
    require_free(out)  # before a model is read for nothing
    opened = open_model(source, base=base, dtype=dtype)
    kind: Literal["model", "adapter", "prefix"] = "model"
    if opened.model.prefix is not None:
        kind = "prefix"
        if merge_adapter:
            raise UserError("a prefix cannot be merged", where=source, cure="export it without --merge")
    elif adapted_layers(opened.model) and not merge_adapter:
        kind = "adapter"
    if kind != "model" and opened.on_a_run:
        what = f"the base of this {kind} is another run's weights (--init-from), which no directory holds"
        raise UserError(what, where=source, cure="export it with --merge")
    _require_finite(opened.model, source)
    with new_directory(out) as directory:
        copy_files(opened.base, directory, TOKENIZER_FILES)
        code = code_files(opened.base / "tokenizer_config.json")
        if kind == "model":
            merge(opened.model)
            if change is None:
                change = (lambda model: model) if layout == "structured" else expand
            kept = dtype or dtype_of(opened.model.origin.config)
            save_model(change(opened.model), directory, layout=layout, dtype=kept)
            (directory / "generation_config.json").write_text(
                json.dumps(_generation_config(opened), indent=2), encoding="utf-8"
            )
            code += code_files(directory / "config.json")
        else:
            save_adapter(opened.model, directory)
        if code:  # code files import others beside them (ChatGLM's modeling file its quantization.py)
            code += [path.name for path in opened.base.glob("*.py")]
        missing = copy_files(opened.base, directory, sorted(set(code)))
    return Exported(kind, out, opened.step, tuple(missing))


def _require_finite(model: Decoder, source: Path) -> None:
    """Refuse a model whose weights are not finite: it answers nothing."""
    odd = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if odd is not None:
        cure = "name another checkpoint: `checkpoints RUN` lists them"
        raise UserError(f"its weights are not finite, as {odd}", where=source, cure=cure)


def _generation_config(opened: Opened) -> dict[str, Any]:
    """The base's own, with every token that ends an answer: where one is missing, answers never end."""
    path = opened.base / "generation_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokenizer, template = load_tokenizer(opened.base, opened.template), get_template(opened.template)
    stops = [tokenizer.special(name) for name in template.stops]
    before = config.get("eos_token_id", opened.model.origin.config.get("eos_token_id"))
    before = before if isinstance(before, list) else [] if before is None else [before]
    config["eos_token_id"] = [*before, *(stop for stop in stops if stop not in before)]
    config.setdefault("pad_token_id", opened.model.origin.config.get("pad_token_id", stops[0]))
    return config
