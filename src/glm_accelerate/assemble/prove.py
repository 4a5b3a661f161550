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
    """All proofs, with the model that training would begin on. Narrow products are proven in float32.

    On the device of training: what is proven on a CPU says nothing about the kernels of a GPU. A model that
    several would share is proven on the CPU: a proof needs only one.
    """
    directory = locate(config.model.path)
    inputs = open_inputs(config.data, directory)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    quantized = kind_of(config.adapt)
    asked, compute = config.precision.compute, None
    if asked != "auto":
        compute = torch.float32 if asked in ("float16", "fp8") else getattr(torch, asked)
    recipe = Recipe(ModelFiles(directory), config.adapt, dtype=dtype, quantized=quantized, compute=compute)
    record, size = current_device(), kept_bytes(read_config(directory)[1], dtype, quantized)
    fits = record.kind == "cpu" or size < record.memory()[0]
    device = record.device if fits else torch.device("cpu")
    model = assemble(recipe, device).model
    return [*prove_inputs(config, inputs, directory), *prove_model(config, model, inputs.tokenizer)]


def prove_all(
    config: RunConfig, inputs: Inputs, model_dir: Path, model: Decoder, ranks: Ranks
) -> list[Proof]:
    """All proofs before a run. The first rank proves what concerns files for all: `transformers` takes half
    a second and 24 MB a process.
    """
    of_files = ranks.decide(lambda: [asdict(one) for one in prove_inputs(config, inputs, model_dir)])
    return [*(Proof(**one) for one in of_files), *prove_model(config, model, inputs.tokenizer)]
