"""LLaMA-Factory's YAML files with their dataset_info.json -> RunConfig and notes.

Every key is mapped, noted with the reason why nothing follows from it, or refused by name. What the file
leaves out is as LLaMA-Factory has it: LoRA of rank 8 with alpha twice the rank, without dropout.
"""

import json
from pathlib import Path
from typing import Any, cast

from glm_accelerate.config.llamafactory_data import source_of
from glm_accelerate.config.llamafactory_keys import ARGUMENTS, NOTED, ONLY, STAGES, TEMPLATES
from glm_accelerate.config.load import read_text
from glm_accelerate.config.stock_keys import ARGS
from glm_accelerate.config.stock_keys import NOTED as TRAINERS_NOTED
from glm_accelerate.config.stock_keys import ONLY as TRAINERS_ONLY
from glm_accelerate.config.strict_yaml import read_document
from glm_accelerate.config.trainer import (
    Imported,
    Reading,
    checkpoints,
    evaluations,
    length,
    optimizer,
    report_to,
    rest,
    sharding,
    step,
)
from glm_accelerate.runtime.errors import UserError

MAPPED = (
    "model_name_or_path stage finetuning_type lora_rank lora_alpha lora_dropout lora_target "
    "additional_target freeze_trainable_layers freeze_extra_modules quantization_bit dataset "
    "eval_dataset dataset_dir val_size max_samples template cutoff_len mask_history packing "
    "early_stopping_steps use_swanlab swanlab_mode"
)
OWN = {*MAPPED.split(), *NOTED, *ONLY, *ARGUMENTS}


def load_llamafactory(yaml_path: str | Path, ranks: int = 1) -> Imported:
    """Read a file; `ranks` is how many devices its run had, for the samples in its step."""
    path = Path(yaml_path)
    document = read_document(read_text(path), str(path))
    left = {key if key in OWN else ARGS + key: value for key, value in document.values.items()}
    reading = Reading(document, {key: value for key, value in left.items() if value is not None}, bare=True)
    for key, cure in ARGUMENTS.items():
        if key in reading.left:
            raise reading.refuse(key, "is not part of a config here", cure)
    if "model_name_or_path" not in reading.left:
        raise UserError("`model_name_or_path` is missing", where=path)
    reading.copy("model_name_or_path", "model.path")
    stage = str(reading.take("stage", "sft"))
    if stage not in STAGES:
        raise reading.refuse("stage", f"is {stage}, which is not offered", f"there are {', '.join(STAGES)}")
    reading.note("stage", "text is learnt whole" if stage == "pt" else "answers are learnt")
    _data(reading, path.parent, stage)
    packs = bool(reading.take("packing", stage == "pt"))
    if "packing" in document.values:
        reading.note("packing", "documents side by side never see each other, and nothing else changes")
    step(reading, ranks, reading.settings["data"]["max_tokens"] if packs else None)
    optimizer(reading)
    steps = length(reading)
    checkpoints(reading, steps)
    evaluations(reading, steps)
    _adapter(reading)
    sharding(reading, path.parent)
    if "early_stopping_steps" in reading.left:
        reading.copy("early_stopping_steps", "evaluate.stop_after")
    lab = bool(reading.take("use_swanlab", False)) and reading.take("swanlab_mode", "cloud") is not None
    if lab:
        reading.settle("observe.sinks", ["swanlab"], "use_swanlab", "online after `swanlab login`")
    report_to(reading, lab)
    rest(reading, TRAINERS_NOTED | NOTED, {**TRAINERS_ONLY, **ONLY})
    return reading.imported()


def _data(reading: Reading, beside: Path, stage: str) -> None:
    directory = str(reading.take("dataset_dir", "data"))
    first = reading.whole("max_samples") if "max_samples" in reading.left else None
    names = reading.take("dataset")
    if names is None:
        raise UserError("`dataset` is missing", where=reading.file.source)
    reading.settle(
        "data.train", _sources(reading, "dataset", names, directory, beside, stage, first), "dataset"
    )
    if first is not None:
        reading.note("max_samples", f"the first {first:,} rows of each file")
    if "dataset_dir" in reading.file.values:
        reading.note("dataset_dir", "where dataset_info.json is")
    share = reading.number("val_size", 0.0)
    held_out = reading.take("eval_dataset")
    if held_out is not None:
        files = _sources(reading, "eval_dataset", held_out, directory, beside, stage, first)
        reading.settle("data.dev", files, "eval_dataset")
    elif share > 0:
        why = "by content: copies never stand on both sides"
        reading.settle("data.dev", share if share < 1 else int(share), "val_size", why)
    if stage == "pt":
        reading.settle("data.format", "text")
    why = "a longer sample loses its oldest turns; LLaMA-Factory shortens every turn in proportion"
    reading.settle("data.max_tokens", reading.whole("cutoff_len", 2048), "cutoff_len", why)
    if "mask_history" in reading.left:
        last = bool(reading.take("mask_history"))
        reading.settle("data.train_on", "last" if last else "all", "mask_history")
    if "template" in reading.left:
        why = (
            "as the model's own files say; an answer ends with the model's own stop tokens here, where "
            "LLaMA-Factory teaches <|endoftext|>"
        )
        name = str(reading.left["template"])
        if name not in TEMPLATES:
            raise reading.refuse(
                "template", f"is {name}, which is not offered", f"there are {', '.join(TEMPLATES)}"
            )
        reading.settle("data.template", TEMPLATES[reading.take("template")], "template", why)


def _sources(
    reading: Reading, key: str, names: Any, directory: str, beside: Path, stage: str, first: int | None
) -> list[dict[str, Any]]:
    """The files that dataset_info.json names, which is found as DeepSpeed's files are."""
    places = [Path(directory), *(above / directory for above in (beside, *beside.parents))]
    path = next((place for place in places if (place / "dataset_info.json").is_file()), None)
    if path is None:
        cure = "say dataset_dir: the directory that holds it"
        raise reading.refuse(key, f"needs {directory}/dataset_info.json, which is not there", cure)
    info_path = path / "dataset_info.json"
    try:
        info = json.loads(read_text(info_path))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{info_path}:{error.lineno}") from error
    listed = names if isinstance(names, list) else str(names).split(",")
    sources = [
        source_of(str(name).strip(), info, info_path, plain=stage == "pt")
        for name in cast("list[Any]", listed)
    ]
    return [source | ({"first": first} if first else {}) for source in sources]


def _adapter(reading: Reading) -> None:
    kind = str(reading.take("finetuning_type", "lora"))
    if kind not in ("lora", "full", "freeze"):
        raise reading.refuse("finetuning_type", f"is {kind}", "lora, full and freeze are offered")
    reading.settle("adapt.method", kind, "finetuning_type" if reading.written("finetuning_type") else "")
    if "additional_target" in reading.left or "freeze_extra_modules" in reading.left:
        key = "additional_target" if "additional_target" in reading.left else "freeze_extra_modules"
        raise reading.refuse(key, "is not offered", "remove it")
    rank = reading.whole("lora_rank", 8)
    alpha, dropout = reading.number("lora_alpha", 2 * rank), reading.number("lora_dropout", 0.0)
    target, layers = reading.take("lora_target", "all"), reading.take("freeze_trainable_layers", 2)
    if kind == "lora":
        reading.settle("adapt.rank", rank, *_from(reading, "lora_rank"))
        why = "" if reading.written("lora_alpha") else "not said: twice the rank"
        reading.settle("adapt.alpha", alpha, "lora_alpha" if not why else "lora_rank", why)
        reading.settle("adapt.dropout", dropout, *_from(reading, "lora_dropout"))
        names = target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
        targets = "all-linear" if names == ["all"] else names
        reading.settle("adapt.targets", targets, *_from(reading, "lora_target"))
    elif kind == "freeze":
        if not isinstance(layers, int) or layers < 1:
            what = f"is {layers}: the last layers train here"
            raise reading.refuse("freeze_trainable_layers", what, "write a number from 1 on")
        reading.settle("adapt.layers", layers, *_from(reading, "freeze_trainable_layers"))
    bits = reading.take("quantization_bit")
    if bits is not None:
        if bits not in (4, 8):
            raise reading.refuse("quantization_bit", f"is {bits}", "4 and 8 are offered")
        reading.settle("adapt.base", "nf4" if bits == 4 else "int8", "quantization_bit")


def _from(reading: Reading, key: str) -> tuple[str, ...]:
    """The key, if the file says it: what it does not say needs no note."""
    return (key,) if reading.written(key) else ()
