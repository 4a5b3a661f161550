"""GLM-4-9B-0414 at full size, with random weights that never were anywhere but on the device; a tiny one."""

from typing import Any

import torch
from torch import nn

from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import family_of

GLM_4_9B_0414: dict[str, Any] = {
    "model_type": "glm4",
    "vocab_size": 151_552,
    "hidden_size": 4_096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "eos_token_id": [151_329, 151_336, 151_338],
    "pad_token_id": 151_329,
}
# Multiples of 16, as 8-bit products want them.
TINY: dict[str, Any] = GLM_4_9B_0414 | {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 16,
    "eos_token_id": [1, 2],
    "pad_token_id": 0,
}


def random_decoder(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """Weights of the size that a trained model's have; computes in bfloat16, its operators bound."""
    family = family_of(config, "benchmarks.gpu")
    with torch.device("meta"):
        model = Decoder(family.read(config), Origin(family.name, config, ""))
    model.to(dtype).to_empty(device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    model.compute = torch.bfloat16
    bind_operators(model)
    return model
