"""What may be meant, but hardly is, has a line; what cannot be meant is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.models.weights import read_config
from glm_accelerate.plan.report import unusual
from glm_accelerate.runtime.errors import UserError

CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})


def test_unusual_values_have_a_line(make_model: Callable[..., Path]) -> None:
    _, sizes, _ = read_config(make_model("glm"))
    sizes = dataclasses.replace(sizes, max_positions=512)
    assert unusual(CONFIG, sizes, 512) == []
    assert unusual(override(CONFIG, ["optim.learning_rate=5"]), sizes, 513) == [
        "optim.learning_rate is 5: usual are 1e-5 to 1e-2, and far higher ones diverge",
        "the longest sample has 513 tokens, and the model was made for 512 positions (data.max_tokens)",
    ]


@pytest.mark.parametrize(
    "word",
    [
        "optim.learning_rate=1e30",
        "data.max_tokens=99999999999",
        "train.steps=10000000000",
        "train.epochs=1e15",
    ],
)
def test_absurd_values_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=word.split("=")[0]):
        override(CONFIG, [word])
