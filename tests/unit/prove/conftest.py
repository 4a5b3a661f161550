"""Model directories of GLM-4's kinds: a tokenizer of single bytes, and the published chat template."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
KINDS = {"glm4-0414": "glm4", "glm4": "glm"}


@pytest.fixture
def model_dir(model_of: Callable[[str], Path]) -> Path:
    return model_of("glm4-0414")


@pytest.fixture
def model_of(tmp_path: Path, chat_templates: dict[str, str]) -> Callable[[str], Path]:
    """A directory of the kind whose template has this name."""
    return lambda name: write_model(tmp_path, KINDS[name], chat_templates[name])


def write_model(directory: Path, kind: str, template: str) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(SPECIAL)
    engine.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    return directory
