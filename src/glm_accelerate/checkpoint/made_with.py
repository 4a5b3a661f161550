"""What weights were made with, in words that a person can compare; only what is long ends in a hash.

A checkpoint's manifest records it; whoever opens the weights compares it with what the run's config builds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm_accelerate.checkpoint.find import resolve_path
from glm_accelerate.checkpoint.format import MANIFEST
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.weights import read_config, weight_files
from glm_accelerate.runtime import env
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
