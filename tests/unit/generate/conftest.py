"""Tiny GLM models with random weights, made by transformers, beside ours that read the same files."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
    "attn_implementation": "eager",
}
FAMILIES = {"glm": (GlmConfig, GlmForCausalLM), "glm4": (Glm4Config, Glm4ForCausalLM)}


@dataclass(frozen=True)
class Pair:
    """The same weights in both implementations."""

    ours: Decoder
    theirs: Any


def make_pair(family: str, dtype: torch.dtype, directory: Path, **sizes: Any) -> Pair:
    config, make = FAMILIES[family]
    torch.manual_seed(0)
    theirs = make(config(**{**SIZES, **sizes})).to(dtype).eval()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (1 if parameter.ndim == 1 else 0)
    theirs.save_pretrained(directory)
    return Pair(load_model(directory).eval(), theirs)


@pytest.fixture(scope="session")
def make() -> Callable[..., Pair]:
    return make_pair


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, torch.float64, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def fresh(tmp_path: Path) -> Decoder:
    """A model of one's own, to adapt."""
    return make_pair("glm4", torch.float64, tmp_path).ours


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Of unequal lengths, not in order."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (5, 1, 17, 9, 30, 2, 11)]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Generator[None]:
    """Tensors this small gain nothing from two, and on a busy machine the second makes them wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
