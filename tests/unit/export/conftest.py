"""A tiny whole model directory, and a run that trained something of it."""

import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.demo.tiny import CHAT_TEMPLATE, build_tokenizer
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from tests.checkpoints import save


@pytest.fixture
def make_base(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """make_base(family, **changes): weights, configs, tokenizer files, and ChatGLM's code files."""

    def make(family: str, **changes: object) -> Path:
        tokenizer = build_tokenizer(["hello"])
        size = tokenizer.get_vocab_size() + 3
        vocabulary = {"padded_vocab_size" if family == "chatglm" else "vocab_size": size}
        directory = make_model(family, **vocabulary, **changes)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        said: dict[str, object] = {"chat_template": "<|user|>"}
        if family == "chatglm":
            said["auto_map"] = {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]}
            config = json.loads((directory / "config.json").read_text())
            config["auto_map"] = {
                "AutoConfig": "configuration_chatglm.ChatGLMConfig",
                "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
                "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
            }
            (directory / "config.json").write_text(json.dumps(config))
            for name in ("tokenization_chatglm", "configuration_chatglm", "modeling_chatglm", "quantization"):
                (directory / f"{name}.py").write_text(f"raise SystemExit('{name} <|observation|> was run')\n")
        (directory / "tokenizer_config.json").write_text(json.dumps(said))
        return directory

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, Decoder]]:
    """make_run(base, adapt section) -> a run with one checkpoint, and the model that it holds."""

    def make(base: Path, template: str, **section: object) -> tuple[Path, Decoder]:
        run = tmp_path / "run"
        config = RunConfig.model_validate(
            {
                "model": {"path": str(base), "dtype": "float32"},
                "data": {"train": "train.jsonl"},
                "adapt": section,
            }
        )
        run.mkdir()
        (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        model = load_model(base, dtype=torch.float32)
        adapt(model, config.adapt, seed=4)
        generator = torch.Generator().manual_seed(5)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
        facts = {"template": template, "method": config.adapt.method}
        save(run, 7, 1, weights=trained, optimizer={}, state={}, fingerprints={}, facts=facts)
        return run, model.eval()

    return make


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Generator[None]:
    """Tensors this small gain nothing from two, and on a busy machine the second makes them wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
