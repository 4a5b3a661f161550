"""A tokenizer that is not the model's own is met before a token is looked up."""

from pathlib import Path

import pytest

from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.demo.tiny import write_tiny
from glm_accelerate.models.weights import load_model
from glm_accelerate.prove.model import prove_vocabulary
from glm_accelerate.prove.proof import require
from glm_accelerate.runtime.errors import UserError


def test_every_token_has_an_embedding(tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small", ["one"])
    large = write_tiny(tmp_path / "large", [f"word{number}" for number in range(500)])
    model = load_model(small)
    assert prove_vocabulary(model, load_tokenizer(small)).ok
    strange = prove_vocabulary(model, load_tokenizer(large))
    assert not strange.ok
    with pytest.raises(UserError, match="the tokenizer files are not this model's"):
        require([strange])
