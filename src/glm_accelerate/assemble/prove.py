"""All proofs of a config from its files alone, before anything is trained."""

from dataclasses import asdict
from pathlib import Path

import torch

from glm_accelerate.assemble.model import assemble
from glm_accelerate.assemble.recipe import ModelFiles, Recipe
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.models.adapt import kept_bytes, kind_of
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import read_config
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.prove.inputs import prove_inputs
from glm_accelerate.prove.model import prove_model
from glm_accelerate.prove.proof import Proof
from glm_accelerate.runtime.device import current_device


def prove_config(config: RunConfig) -> list[Proof]:
    """With the model that training would begin on."""
    directory = locate(config.model.path)
    inputs = open_inputs(config.data, directory)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    quantized = kind_of(config.adapt)
    recipe = Recipe(
        ModelFiles(directory), config.adapt, dtype=dtype, quantized=quantized, compute=_compute(config)
    )
    device = _device_for(kept_bytes(read_config(directory)[1], dtype, quantized))
    model = assemble(recipe, device).model
    return [*prove_inputs(config, inputs, directory), *prove_model(config, model, inputs.tokenizer)]


def _compute(config: RunConfig) -> torch.dtype | None:
    """What the config asks for; narrow products are proven in float32."""
    asked = config.precision.compute
    if asked == "auto":
        return None
    return torch.float32 if asked in ("float16", "fp8") else getattr(torch, asked)


def _device_for(size: int) -> torch.device:
    """Where training will run: what is proven on a CPU says nothing about the kernels of a GPU."""
    record = current_device()
    fits = record.kind == "cpu" or size < record.memory()[0]
    return record.device if fits else torch.device("cpu")  # several will share it, and a proof needs only one


def prove_all(
    config: RunConfig, inputs: Inputs, model_dir: Path, model: Decoder, ranks: Ranks
) -> list[Proof]:
    """Before a run. Proofs of files by the first rank for all: `transformers` takes half a second and 24 MB a
    process.
    """
    of_files = ranks.decide(lambda: [asdict(one) for one in prove_inputs(config, inputs, model_dir)])
    return [*(Proof(**one) for one in of_files), *prove_model(config, model, inputs.tokenizer)]
