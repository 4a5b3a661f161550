"""P-tuning v2: every layer gets learnt keys and values that stand before each document.

As in ChatGLM's own code they carry no rotary positions and shift nobody else's.
Letters: P prefix tokens, L layers, K key/value heads, D head width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from glm_accelerate.models.decoder import Decoder

TENSOR = "transformer.prefix_encoder.embedding.weight"  # its name in ChatGLM's checkpoints


class Prefix(nn.Module):
    """One row a prefix token: for each layer its keys, then its values."""

    def __init__(self, model: Decoder, tokens: int, share: float, generator: torch.Generator) -> None:
        super().__init__()
        sizes = model.sizes
        self.shape = (tokens, sizes.layers, 2, sizes.kv_heads, sizes.head_width)
        width = sizes.layers * 2 * sizes.kv_heads * sizes.head_width
        weight = torch.empty(tokens, width).normal_(generator=generator)
        self.weight = nn.Parameter(weight if model.embed.is_meta else weight.to(model.embed.device))
        self.share = share

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """(keys_KPD, values_KPD) of every layer."""
        rows_PL2KD = dropout(self.weight, self.share, self.training).view(self.shape)
        return [(layer[0], layer[1]) for layer in rows_PL2KD.permute(1, 2, 3, 0, 4).unbind(0)]


def add_prefix(model: Decoder, tokens: int, share: float, seed: int = 0) -> None:
    """Freeze the model and put a learnt prefix before it, in place."""
    model.requires_grad_(False)
    model.prefix = Prefix(model, tokens, share, torch.Generator().manual_seed(seed))
