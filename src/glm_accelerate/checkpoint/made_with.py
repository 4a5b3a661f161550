"""What weights were made with, in words that a person can compare; only what is long ends in a hash.

A checkpoint's manifest records it; whoever goes on from it, or opens its weights, compares.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.format import MANIFEST
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import AdaptSection, OptimSection, RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.models.adapt import kind_of
from glm_accelerate.models.weights import read_config, weight_files
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime import env
from glm_accelerate.runtime.device import current_device
from glm_accelerate.runtime.digests import file_digest
from glm_accelerate.runtime.errors import UserError

SHOWN = 32  # hexadecimal digits of a hash: 128 bits
MOST_THREADS = 8


def made_with(model_dir: Path, section: AdaptSection, begun_on: Path | None) -> dict[str, str]:
    """The structure that a run's tensors belong to. `begun_on`: the model or checkpoint whose weights the
    run began on (--init-from).
    """
    begun = ""
    if (
        begun_on is not None
    ):  # a checkpoint's manifest has the digests of its files; of a run it is the newest's
        whole_model = (begun_on / "config.json").is_file()
        files = weight_files(begun_on) if whole_model else [resolve_path(begun_on) / MANIFEST]
        begun = f", begun on {_digest_of_all(files)}"
    return {"model": model_content(model_dir) + begun, "adapt": _adapt(section)}


def require_made_with(reader: Reader, now: Mapping[str, str]) -> None:
    """Refuses weights that were trained on another base, or with another adapter, than is built here."""
    then = reader.manifest.fingerprints
    if "environment" in then:  # schema 1 recorded less
        return
    for name, cure in (("model", "--base DIR names the model that it was trained on"), ("adapt", None)):
        if (before := then.get(name, now[name])) != now[name]:
            what = f"made with another {name} than its run's config.yaml builds: {before}, not {now[name]}"
            cure = cure or "put the old values back into config.yaml"
            raise UserError(what, where=reader.directory, cure=cure)


def fingerprints(
    config: RunConfig,
    plan: RunPlan,
    model_dir: Path,
    inputs: Inputs,
    *,
    ranks: int = 1,
    begun_on: Path | None = None,
) -> dict[str, str]:
    """Everything that has to be the same for a resume to mean anything, and what the last bit depends on."""
    train, optim = config.train, config.optim
    step = f"{plan.step_samples} samples" if plan.step_samples else f"{plan.step_tokens} tokens"
    weights = " ".join(f"{span.weight:g}" for span in inputs.train.spans)
    store = inputs.train
    kept = f"{plan.dtype} and {config.model.dtype}" if kind_of(config.adapt) else plan.dtype
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
        "precision": f"weights {kept}, products {plan.compute}",
        "ranks": str(ranks),
        "passes": f"{plan.micro_tokens} tokens",
        "device": _device(),
        "versions": f"glm-accelerate {version('glm-accelerate')}, torch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
    }


def _updates(optim: OptimSection) -> str:
    both = f"weight decay {optim.weight_decay}, clip {optim.clip}"
    if optim.name == "adafactor":
        return both
    return f"betas {optim.betas[0]} {optim.betas[1]}, epsilon {optim.epsilon}, {both}"


def _device() -> str:
    """What computes: other chips and other vector widths add in another order."""
    record = current_device()
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}" if record.kind == "cpu" else record.name()


def model_content(directory: Path) -> str:
    """Sizes for people, and the content of config.json and of every weight file."""
    family, sizes, _ = read_config(directory)
    content = _digest_of_all([directory / "config.json", *weight_files(directory)])
    return (
        f"{family.name}, {sizes.layers} layers of {sizes.width}, {sizes.heads} heads on {sizes.kv_heads}, "
        f"vocabulary {sizes.vocabulary}, {content}"
    )


def _adapt(section: AdaptSection) -> str:
    targets = section.targets if isinstance(section.targets, str) else " ".join(section.targets)
    return {
        "lora": f"lora, rank {section.rank}, alpha {section.alpha}, {targets}",
        "freeze": f"freeze, the last {section.layers} layers train",
        "prefix": f"prefix, {section.prefix_tokens} tokens",
        "full": "full",
    }[section.method]


def _digest_of_all(files: Sequence[Path]) -> str:
    """One hash of many files, read side by side: hashing leaves the interpreter's lock."""
    with ThreadPoolExecutor(max(1, min(len(files), env.cores(), MOST_THREADS))) as pool:
        digests = list(pool.map(file_digest, files))
    lines = [f"{file.name} {digest}" for file, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:SHOWN]
