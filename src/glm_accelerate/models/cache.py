"""Keys and values of the tokens generated so far, allocated once.

The first pass runs over the prompts, packed in one row; each later pass over one new token a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm_accelerate.models.sizes import Sizes


class KeyValueCache:
    """Room for `capacity` tokens in each of `rows` sequences. `lengths_B` says how many are filled."""

    def __init__(
        self, sizes: Sizes, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (sizes.layers, rows, capacity, sizes.kv_heads, sizes.head_width)
        self.keys_LBSKD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBSKD = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.used = 0  # the longest row, known without asking the device
        self.filled = False

    def fill(self, layer: int, k_1TKD: Tensor, v_1TKD: Tensor, lengths: Sequence[int]) -> None:
        """Store the prompts' keys and values: documents of `lengths`, side by side."""
        for row, (k, v) in enumerate(
            zip(k_1TKD[0].split(list(lengths)), v_1TKD[0].split(list(lengths)), strict=True)
        ):
            self.keys_LBSKD[layer, row, : len(k)] = k
            self.values_LBSKD[layer, row, : len(v)] = v

    def append(self, layer: int, k_B1KD: Tensor, v_B1KD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token a row; returns all keys and values up to the longest row."""
        rows = torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        self.keys_LBSKD[layer, rows, self.lengths_B] = k_B1KD[:, 0].to(self.keys_LBSKD.dtype)
        self.values_LBSKD[layer, rows, self.lengths_B] = v_B1KD[:, 0].to(self.values_LBSKD.dtype)
        return self.keys_LBSKD[layer, :, : self.used + 1], self.values_LBSKD[layer, :, : self.used + 1]

    def advance(self, lengths: Sequence[int] | None = None) -> None:
        """After all layers: the prompts are in (`lengths`), or every row has grown by one."""
        if lengths is not None:
            self.lengths_B += torch.tensor(lengths, device=self.lengths_B.device)
            self.used = max(lengths)
            self.filled = True
        else:
            self.lengths_B += 1
            self.used += 1

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these: the others have stopped."""
        self.keys_LBSKD = self.keys_LBSKD[:, rows]
        self.values_LBSKD = self.values_LBSKD[:, rows]
        self.lengths_B = self.lengths_B[rows]
        self.used = int(self.lengths_B.max())
