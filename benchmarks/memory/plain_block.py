"""A GLM-4-0414 block in PyTorch's own operators, as torch.compile wants to see it: what its compile-time
budget is measured on. The same sizes, products in bfloat16, and adapters as ours.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from glm_accelerate.models.adapt.lora import LoraSettings
from glm_accelerate.models.sizes import Sizes


class PlainLinear(nn.Module):
    """Weights in float32 that train, or frozen ones in bfloat16 with an adapter."""

    def __init__(self, inputs: int, outputs: int, lora: LoraSettings | None, bias: bool = False) -> None:
        super().__init__()
        dtype = torch.float32 if lora is None else torch.bfloat16
        self.weight = nn.Parameter(torch.randn(outputs, inputs).mul_(0.02).to(dtype), lora is None)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype), lora is None) if bias else None
        self.lora = lora
        if lora is not None:
            self.lora_A = nn.Parameter(torch.randn(lora.rank, inputs).mul_(0.02))
            self.lora_B = nn.Parameter(torch.randn(outputs, lora.rank).mul_(0.02))

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = functional.linear(x, self.weight.to(x.dtype), bias)
        if self.lora is None:
            return out
        dropped = functional.dropout(x, self.lora.dropout, self.training)
        down = functional.linear(dropped, self.lora_A.to(x.dtype))
        return out + self.lora.scale * functional.linear(down, self.lora_B.to(x.dtype))


class PlainNorm(nn.Module):
    def __init__(self, width: int, epsilon: float, trained: bool) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width), trained), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight.float()).to(x.dtype)


class PlainBlock(nn.Module):
    """Rows are whole documents. `table_TD2`: cosine and sine of every position."""

    def __init__(self, sizes: Sizes, lora: LoraSettings | None) -> None:
        super().__init__()
        self.sizes = sizes
        width, query, key = sizes.width, sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        self.norms = nn.ModuleList(PlainNorm(width, sizes.norm_epsilon, lora is None) for _ in range(4))
        self.q, self.k, self.v = (
            PlainLinear(width, outputs, lora, sizes.qkv_bias) for outputs in (query, key, key)
        )
        self.o = PlainLinear(query, width, lora)
        self.gate_up = PlainLinear(width, 2 * sizes.mlp_width, lora)
        self.down = PlainLinear(sizes.mlp_width, width, lora)

    def forward(self, x_BTH: Tensor, table_TD2: Tensor) -> Tensor:
        x_BTH = x_BTH + self.norms[1](self._attend(self.norms[0](x_BTH), table_TD2))
        gate, up = self.gate_up(self.norms[2](x_BTH)).chunk(2, dim=-1)
        return x_BTH + self.norms[3](self.down(functional.silu(gate) * up))

    def _attend(self, x_BTH: Tensor, table_TD2: Tensor) -> Tensor:
        D, groups = self.sizes.head_width, self.sizes.heads // self.sizes.kv_heads
        q, k, v = (layer(x_BTH).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self._turned(q, table_TD2), self._turned(k, table_TD2)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def _turned(self, x_BNTD: Tensor, table_TD2: Tensor) -> Tensor:
        turned, rest = x_BNTD.float().tensor_split((self.sizes.rope_width,), dim=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        cosine, sine = table_TD2.unbind(-1)
        made = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)
        return torch.cat((made, rest), -1).to(x_BNTD.dtype)
