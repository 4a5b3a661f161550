"""The decoder of every dense GLM: ChatGLM2/3, GLM-4 and GLM-4-0414. Single-device, ordinary PyTorch.

Letters: B rows, T tokens, H width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from glm_accelerate.kernels.choose import Form, form_now
from glm_accelerate.kernels.linear_cross_entropy import VocabularyPart
from glm_accelerate.kernels.rms_norm import add_norm, rms_norm, sandwich, sum_norm
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.kernels.swiglu import swiglu
from glm_accelerate.models.attention import Attention, Prefix
from glm_accelerate.models.cache import KeyValueCache
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import Linear, projection
from glm_accelerate.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model came from: its family's name, its config.json, its directory, and its name."""

    family: str
    config: dict[str, Any]
    path: str
    name: str = ""  # what the user called it: a path, or a hub's name


class Words(VocabularyPart, Protocol):
    """Of several processes with the same rows, each has some words of embedding and head."""

    def embed(self, tokens_BT: Tensor, weight_VH: Tensor) -> Tensor:
        """Of all words, from the weights of those that are here."""
        ...

    def enter(self, x_BTH: Tensor) -> Tensor:
        """What the heads of all processes read: their gradients of it are summed."""
        ...


class StageLink(Protocol):
    """Of several processes, each has some of the layers: what enters them, and where what comes out goes.
    `carries`: the dtype of what enters a layer from another process, by the layer's number.
    """

    carries: Callable[[int], torch.dtype] | None

    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    @property
    def layers(self) -> int: ...
    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def send(self, x: Tensor) -> Tensor: ...
    def share(self, logits: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon
        self.form: Form = "eager"

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, form_now(self.form, self.training))


class MLP(nn.Module):
    """down(silu(gate) * up); one matrix makes gate and up."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        name = f"layers.{layer}.mlp"
        self.gate_up_proj = projection(sizes, f"{name}.gate_up_proj", sizes.width, 2 * sizes.mlp_width)
        self.down_proj = projection(sizes, f"{name}.down_proj", sizes.mlp_width, sizes.width)
        self.form: Form = "eager"

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x), form_now(self.form, self.training)))


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)); GLM-4-0414 also norms what each branch returns."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.width, sizes.norm_epsilon)
        self.self_attn = Attention(sizes, layer)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.norm_epsilon)  # before the MLP
        self.mlp = MLP(sizes, layer)
        self.sandwich = sizes.sandwich
        if sizes.sandwich:
            self.post_self_attn_layernorm = RMSNorm(sizes.width, sizes.norm_epsilon)
            self.post_mlp_layernorm = RMSNorm(sizes.width, sizes.norm_epsilon)
        self.form: Form = "eager"

    def forward(
        self,
        x_BTH: Tensor,
        layout: Layout,
        table: Tensor,
        prefix: Prefix | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTH), layout, table, prefix, cache)
        before, form = self.post_attention_layernorm, form_now(self.form, self.training)
        if not self.sandwich:
            x_BTH, normed = sum_norm(x_BTH, attended, before.weight, before.epsilon, form)
            return x_BTH + self.mlp(normed)
        after, last = self.post_self_attn_layernorm, self.post_mlp_layernorm
        x_BTH, normed = sandwich(x_BTH, attended, after.weight, before.weight, before.epsilon, form)
        return add_norm(x_BTH, self.mlp(normed), last.weight, last.epsilon, form)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. `compute`: dtype of activations; `recompute`: less memory, more time."""

    def __init__(self, sizes: Sizes, origin: Origin) -> None:
        super().__init__()
        self.sizes, self.origin = sizes, origin
        self.compute: torch.dtype | None = None  # None: as the embedding is kept
        self.recompute = False
        self.compiled = False  # set by `models.bind`, with the form of every part
        self.form: Form = "eager"
        self.embed = nn.Parameter(torch.empty(sizes.vocabulary, sizes.width))
        blocks = [Block(sizes, layer) for layer in range(sizes.layers)]
        if sizes.shared_qk > 1:  # the very same modules: a change of one is a change of all
            for layer, block in enumerate(blocks):
                block.self_attn.share(blocks[layer - layer % sizes.shared_qk].self_attn)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(sizes.width, sizes.norm_epsilon)
        self.head = Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embed
        self.words: Words | None = None  # None: embedding and head have all
        self.prefix: nn.Module | None = None  # P-tuning v2: gives every layer keys and values
        self.stage: StageLink | None = None  # None: all layers are here

    def hidden(self, tokens_BT: Tensor, layout: Layout, cache: KeyValueCache | None = None) -> Tensor:
        """The normed input of the head. Packed documents of `layout` never see each other.

        Of a model that is divided into stages, on all but the last: what has gone on to the next.
        """
        stage, x_BTH = self.stage, self._entering(tokens_BT)
        table = rope_table(layout.positions_BT, self.sizes.rope_width, self.sizes.rope_theta)
        prefixes: list[Prefix | None] = (
            self.prefix() if self.prefix is not None else [None] * len(self.layers)
        )
        for block, prefix in zip(self.layers, prefixes, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x_BTH = checkpoint(block, x_BTH, layout, table, prefix, None, use_reentrant=False)
            else:
                x_BTH = block(x_BTH, layout, table, prefix, cache)
        if cache is not None:
            cache.advance(None if cache.filled else layout.lengths)
        if stage is not None and not stage.last:
            return stage.send(x_BTH)
        x_BTH = self.norm(x_BTH)
        return x_BTH if self.words is None else self.words.enter(x_BTH)

    def tokens_here(self, tokens: int) -> int:
        """Of a pass with gradients, where several processes share every product, norms and sums have a part
        each.
        """
        return tokens // self.sizes.spread if torch.is_grad_enabled() else tokens

    def _entering(self, tokens_BT: Tensor) -> Tensor:
        """What the first layer here reads."""
        words, stage = self.words, self.stage
        if stage is not None and not stage.first:
            B, T = tokens_BT.shape
            shape = (B, self.tokens_here(T), self.sizes.width)
            return stage.receive(shape, self.compute or self.embed.dtype, self.embed.device)
        x_BTH = embedding(tokens_BT, self.embed) if words is None else words.embed(tokens_BT, self.embed)
        return x_BTH if self.compute is None else x_BTH.to(self.compute)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of what `hidden` returned, on every process that has some of the layers."""
        if self.stage is None:
            return self.head(hidden)
        made = self.head(hidden) if self.stage.last else None
        return self.stage.share(made, (*hidden.shape[:-1], self.sizes.vocabulary), hidden)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Logits of every position. Positions that restart mark packed documents; else a row is one."""
        B, T = tokens_BT.shape
        if positions_BT is None:
            layout = Layout.of_documents([(T,)] * B, tokens_BT.device)
        else:
            layout = Layout.of_positions(positions_BT)
        return self.logits(self.hidden(tokens_BT, layout))
