"""What a checkpoint is made with, in words a person can compare; only what is long ends in a hash."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.format import MANIFEST
from glm_accelerate.config.schema import AdaptSection, OptimSection, RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.models.adapt.quantized import kind_of
from glm_accelerate.models.weights import read_config, weight_files
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime import env
from glm_accelerate.runtime.digests import file_digest

SHOWN = 32  # hexadecimal digits of a hash: 128 bits
MOST_THREADS = 8


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

    `begun_on`: the model, run or checkpoint whose weights the run began on (--init-from).
    """
    train, optim = config.train, config.optim
    step = f"{plan.step_samples} samples" if plan.step_samples else f"{plan.step_tokens} tokens"
    weights = " ".join(f"{span.weight:g}" for span in inputs.train.spans)
    store = inputs.train
    return {
        "model": model_content(model_dir) + (f", begun on {_begun_on(begun_on)}" if begun_on else ""),
        "data": f"{len(store)} samples, {int(store.lengths.sum())} tokens, {store.fingerprint[:SHOWN]}",
        "tokenizer": inputs.tokenizer.fingerprint[:SHOWN],
        "template": inputs.template.name,
        "order": f"seed {train.seed}, {step} a step, sources x {weights}, {config.data.batching}",
        "schedule": f"{optim.schedule}, {plan.steps} steps, {plan.warmup_steps} of them warm-up, "
        f"rate {optim.learning_rate}, decay {optim.decay}, floor {optim.floor}",
        "optimizer": optim.name,
        "updates": _updates(optim),
        "adapt": _adapt(config.adapt),
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


def _adapt(section: AdaptSection) -> str:
    targets = section.targets if isinstance(section.targets, str) else " ".join(section.targets)
    said: dict[str, Callable[[], str]] = {
        "lora": lambda: f"lora, rank {section.rank}, alpha {section.alpha}, {targets}",
        "freeze": lambda: f"freeze, the last {section.layers} layers train",
        "prefix": lambda: f"prefix, {section.prefix_tokens} tokens",
        "full": lambda: f"full{_restructured(section)}",
    }
    return said[section.method]()


def _restructured(section: AdaptSection) -> str:
    if not section.restructures:
        return ""
    return f", {section.share_qk} layers share projections, energy {section.keep_energy}"


def model_content(directory: Path) -> str:
    """Sizes for people, and the content of config.json and of every weight file."""
    family, sizes, _ = read_config(directory)
    files = [directory / "config.json", *weight_files(directory)]
    content = _together(files)
    return (
        f"{family.name}, {sizes.layers} layers of {sizes.width}, {sizes.heads} heads on {sizes.kv_heads}, "
        f"vocabulary {sizes.vocabulary}, {content}"
    )


def _begun_on(source: Path) -> str:
    """A checkpoint's manifest has the digests of its files; of a run it is the newest one's."""
    if (source / "config.json").is_file():
        return _together(weight_files(source))
    return _together([resolve_path(source) / MANIFEST])


def _together(files: Sequence[Path]) -> str:
    """One hash of many files, read side by side: hashing leaves the interpreter's lock."""
    with ThreadPoolExecutor(max(1, min(len(files), env.cores(), MOST_THREADS))) as pool:
        digests = list(pool.map(file_digest, files))
    lines = [f"{file.name} {digest}" for file, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:SHOWN]


def _device() -> str:
    """What computes: other chips and other vector widths add in another order."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.cuda.current_device())
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"
