"""What a checkpoint was made with, as short hashes, so that a resume on something else is noticed by name."""

import hashlib
import json
from pathlib import Path

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.models.weights import weight_files
from glm_accelerate.runtime.errors import UserError

CURES = {
    "model": "resume with the base model that the run began with",
    "data": "resume with the same data files, or start a new run with --run and --init-from",
    "tokenizer": "resume with the tokenizer files that the run began with",
    "template": "resume with the same data.template",
    "optimizer": "resume with the same optim and adapt sections",
}


def fingerprints(config: RunConfig, model_dir: Path, inputs: Inputs) -> dict[str, str]:
    """Everything that has to be the same for a resume to mean anything, and the environment besides."""
    optim = config.optim.model_dump(mode="json", include={"name", "betas", "epsilon", "weight_decay"})
    return {
        "model": _of_model(model_dir),
        "data": inputs.train.fingerprint,
        "tokenizer": inputs.tokenizer.fingerprint,
        "template": inputs.template.name,
        "optimizer": _hash(
            json.dumps([optim, config.adapt.model_dump(mode="json")], sort_keys=True).encode()
        ),
        "environment": f"torch {torch.__version__}, {torch.get_num_threads()} threads",
    }


def check(then: dict[str, str], now: dict[str, str], where: object) -> list[str]:
    """Raises where a resume would be meaningless; warns where it is only no longer bit-identical."""
    for name, cure in CURES.items():
        if then.get(name) != now[name]:
            raise UserError(f"the {name} is not what this checkpoint was made with", where=where, cure=cure)
    if then.get("environment") != now["environment"]:
        return [
            f"environment was {then.get('environment')}, is {now['environment']}: not bit-identical any more"
        ]
    return []


def _of_model(directory: Path) -> str:
    """config.json, and the header and size of each weight file: cheap even where the model is 800 GB."""
    parts = [(directory / "config.json").read_bytes()]
    for file in weight_files(directory):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            parts += [str(file.stat().st_size).encode(), opened.read(length)]
    return _hash(b"\0".join(parts))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
