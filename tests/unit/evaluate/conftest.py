"""A tiny model of our own, samples, and a tokenizer of readable words."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from glm_accelerate.data.types import FilePlace, Sample
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes

STOP = 1
SIZES = Sizes(
    vocabulary=67, width=24, mlp_width=40, layers=2, heads=6, kv_heads=2, head_width=8, norm_epsilon=1e-5,
    rope_theta=1e4, rope_width=4, qkv_bias=True, max_positions=128, sandwich=True,
)  # fmt: skip


class Words:
    """A tokenizer whose token 7 reads `w7 `; a token below 3 is special and reads `<2>`."""

    vocab_size = SIZES.vocabulary
    fingerprint = "words"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word[1:]) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(f"w{i} " if i > 2 else "" if skip_special else f"<{i}>" for i in ids)

    def special(self, name: str) -> int:
        return {"stop": STOP}[name]


class Held:
    """Samples in a list, as a store has them."""

    fingerprint = "held out"

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([len(sample) for sample in self._samples], np.int32)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Sample:
        return self._samples[number]


def make_sample(tokens: Sequence[int], learnt: Sequence[int], line: int = 1) -> Sample:
    targets = np.zeros(len(tokens), bool)
    targets[list(learnt)] = True
    return Sample(np.array(tokens, np.int32), targets, FilePlace("dev.jsonl", line))


@pytest.fixture
def model() -> Decoder:
    model = Decoder(SIZES, Origin("glm4", {}, "nowhere"))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = noise + (1 if parameter.ndim == 1 else 0)
    return model.double()


@pytest.fixture
def samples() -> list[Sample]:
    """Of unequal lengths and shares of targets; the third has none."""
    draw: Any = np.random.default_rng(5)
    made: list[Sample] = []
    for number, length in enumerate((9, 30, 12, 4, 21, 17, 40)):
        tokens = draw.integers(3, SIZES.vocabulary, length)
        learnt = [] if number == 2 else range(length // 2, length)
        made.append(make_sample(tokens.tolist(), learnt, number + 1))
    return made


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """sample(tokens, learnt positions)."""
    return make_sample


@pytest.fixture
def held() -> type[Held]:
    """held(samples)."""
    return Held


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Generator[None]:
    """Tensors this small gain nothing from two, and on a busy machine the second makes them wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
