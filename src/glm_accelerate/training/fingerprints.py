"""What a checkpoint is made with, in words a person can compare; only what is long ends in a hash."""

from importlib.metadata import version
from pathlib import Path

import torch

from glm_accelerate.checkpoint.made_with import SHOWN, made_with
from glm_accelerate.config.schema import OptimSection, RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.models.adapt import kind_of
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import current_device


def fingerprints(
    config: RunConfig,
    plan: RunPlan,
    model_dir: Path,
    inputs: Inputs,
    *,
    ranks: int = 1,
    begun_on: Path | None = None,
) -> dict[str, str]:
    """Everything that has to be the same for a resume to mean anything, and what the last bit depends on.

    `begun_on`: the model or checkpoint whose weights the run began on (--init-from).
    """
    train, optim = config.train, config.optim
    step = f"{plan.step_samples} samples" if plan.step_samples else f"{plan.step_tokens} tokens"
    weights = " ".join(f"{span.weight:g}" for span in inputs.train.spans)
    store = inputs.train
    return {
        **made_with(model_dir, config.adapt, begun_on),
        "data": f"{len(store)} samples, {int(store.lengths.sum())} tokens, {store.fingerprint[:SHOWN]}",
        "tokenizer": inputs.tokenizer.fingerprint[:SHOWN],
        "template": inputs.template.name,
        "order": f"seed {train.seed}, {step} a step, sources x {weights}, {config.data.batching}",
        "schedule": f"{optim.schedule}, {plan.steps} steps, {plan.warmup_steps} of them warm-up, "
        f"rate {optim.learning_rate}, decay {optim.decay}, floor {optim.floor}",
        "optimizer": optim.name,
        "updates": _updates(optim),
        "dropout": f"{config.adapt.dropout}" if config.adapt.method in ("lora", "prefix") else "none",
        "precision": f"weights {_kept(config, plan)}, products {plan.compute}",
        "ranks": str(ranks),
        "passes": f"{plan.micro_tokens} tokens",
        "device": _device(),
        "versions": f"glm-accelerate {version('glm-accelerate')}, torch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
    }


def _kept(config: RunConfig, plan: RunPlan) -> str:
    return f"{plan.dtype} and {config.model.dtype}" if kind_of(config.adapt) else plan.dtype


def _updates(optim: OptimSection) -> str:
    said = f"weight decay {optim.weight_decay}, clip {optim.clip}"
    if optim.name == "adafactor":
        return said
    return f"betas {optim.betas[0]} {optim.betas[1]}, epsilon {optim.epsilon}, {said}"


def _device() -> str:
    """What computes: other chips and other vector widths add in another order."""
    record = current_device()
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}" if record.kind == "cpu" else record.name()
