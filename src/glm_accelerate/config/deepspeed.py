"""A DeepSpeed JSON file as the stock scripts use it -> how state is divided among ranks.

Its rate, clipping and samples in a step have to be `auto` or what the stock YAML says, as for the stock
trainer. Buckets and prefetching have no counterpart, as they do not change the result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from glm_accelerate.config.load import read_text
from glm_accelerate.config.stock_keys import STAGES
from glm_accelerate.runtime.errors import UserError

# Keys of DeepSpeed that have to agree with ours, where they are numbers.
AGREE = {
    "gradient_clipping": "clip",
    "lr": "learning_rate",
    "eps": "epsilon",
    "betas": "betas",
    "weight_decay": "weight_decay",
    "train_batch_size": "step_samples",
}
# These change speed, memory or logging only.
SILENT = {
    "activation_checkpointing",
    "bf16",
    "communication_data_type",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "prescale_gradients",
    "steps_per_print",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}


def read_deepspeed(value: object, beside: Path, where: str, ours: Mapping[str, Any]) -> tuple[str, str]:
    """`parallel.shard`, and why. `value` is the settings, or a path relative to the current directory, to the
    YAML's (`beside`) or to one above it.
    """
    if isinstance(value, str):
        places = (Path(value), *(above / value for above in (beside, *beside.absolute().parents)))
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            what = f"`training_args.deepspeed`: there is no file {value}"
            raise UserError(what, where=where, cure="remove it")
        value, where = _parse(path), str(path)
    if not isinstance(value, dict):
        raise UserError("DeepSpeed settings are a path or a section", where=where)
    settings = cast("dict[str, Any]", value)
    for key, setting in settings.items():
        if key in AGREE:
            _agree(key, setting, ours, where)
        elif key == "optimizer":
            _optimizer(setting, ours, where)
        elif key not in SILENT and key != "zero_optimization":
            raise UserError(f"`{key}` is not understood", where=where, cure="remove it")
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else zero
    if not isinstance(stage, int) or stage not in STAGES:
        raise UserError(f"`zero_optimization.stage` is {stage}", where=where, cure="0 to 3 are offered")
    why = f"ZeRO stage {stage}"
    if isinstance(zero, dict) and any(key.startswith("offload_") for key in zero):
        why += "; what is kept in host memory is for memory.offload and the plan to say"
    return STAGES[stage], why


def _parse(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}") from error


def _agree(key: str, theirs: object, ours: Mapping[str, Any], where: str) -> None:
    mine = ours[AGREE[key]]
    if theirs not in ("auto", mine):
        raise UserError(f"`{key}` is {theirs}, but the YAML says {mine}", where=where, cure='write "auto"')


def _optimizer(theirs: Any, ours: Mapping[str, Any], where: str) -> None:
    if not isinstance(theirs, dict) or str(theirs.get("type")).lower() not in ("adam", "adamw"):
        raise UserError("`optimizer` is not AdamW", where=where, cure="AdamW is offered here")
    params = theirs.get("params", {})
    if not isinstance(params, dict):
        raise UserError("`optimizer.params` is no section", where=where, cure="remove it")
    for key, value in cast("dict[str, Any]", params).items():
        if key in AGREE:
            _agree(key, value, ours, where)
        elif key not in ("torch_adam", "adam_w_mode", "bias_correction"):
            raise UserError(f"`optimizer.params.{key}` is not understood", where=where, cure="remove it")
