"""Compiled operators in a model, switched on from outside. They run in training passes alone: what is
evaluated or generated comes in too many shapes, and stays eager.
"""

import torch

from glm_accelerate.models.attention import Attention
from glm_accelerate.models.decoder import Block, Decoder
from glm_accelerate.models.mlp import MLP
from glm_accelerate.models.norm import RMSNorm


def compile_operators(model: Decoder) -> None:
    """Attention only where its products gain: in bfloat16 on a CPU."""
    compute = model.compute or model.embed.dtype
    assert compute != torch.float64  # sums are float32
    model.compiled = True
    for part in model.modules():
        if isinstance(part, Block | MLP | RMSNorm):
            part.compiled = True
        elif isinstance(part, Attention):
            part.compiled = compute == torch.bfloat16 and model.embed.device.type == "cpu"
