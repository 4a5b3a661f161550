"""Small real things that tests share: model directories with random weights in every family."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.demo.tiny import Size, write_tiny
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import FAMILIES
from glm_accelerate.plan import probe
from tests.warm import UNMEASURED, Place, Warm, start

# Ignored under nohup and in the background of a script, and then by all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings

# Odd on purpose: 6 query heads on 2, head_dim that is not hidden / heads, an odd vocabulary.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "rope_theta": 5e6,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
    "hidden_act": "silu",
}
CHATGLM_SIZES = {
    "padded_vocab_size": 131,
    "hidden_size": 60,
    "ffn_hidden_size": 100,
    "num_layers": 3,
    "num_attention_heads": 6,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 16,
    "seq_length": 512,
    "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True,
    "rope_ratio": 500,
    "rmsnorm": True,
    "post_layer_norm": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "chatglm": "ChatGLMModel"}


def config_of(family: str, **changes: object) -> dict[str, object]:
    """A tiny config.json of a family."""
    sizes = CHATGLM_SIZES if family == "chatglm" else SIZES
    return {"model_type": family, "architectures": [ARCHITECTURES[family]], **sizes, **changes}


def random_weights(
    family: str, config: dict[str, object], seed: int = 0, scale: float = 0.1
) -> dict[str, Tensor]:
    """Every tensor random, norms and biases included: zeros and ones would hide mistakes in them."""
    described = FAMILIES[family]
    with torch.device("meta"):
        model = Decoder(described.read(config), Origin(family, config, ""))
    generator = torch.Generator().manual_seed(seed)
    return {
        described.theirs(name): torch.randn(parameter.shape, generator=generator) * scale
        + name.endswith("norm.weight")
        for name, parameter in model.named_parameters()
    }


WHOLE = ("distributed", "faults", "system")  # folders of whole runs and commands


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `process` what starts processes: by its folder, or the fixtures that it starts them with."""
    for item in items:
        starts = {"warm", "spawn"} & set(getattr(item, "fixturenames", ()))
        if starts or item.path.relative_to(Path(__file__).parent).parts[0] in WHOLE:
            item.add_marker("process")
        if item.get_closest_marker("prove"):
            item.add_marker("process")  # so that `not process` leaves it out


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run is not measured before it begins, which takes seconds: tests of just that set it back."""
    monkeypatch.setattr(probe, "WORTH", UNMEASURED["glm_accelerate.plan.probe.WORTH"])


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """make_model(family, seed=0, dtype=torch.float32, **config changes) -> a model directory."""

    def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        directory = tmp_path / f"{family}-{seed}"
        directory.mkdir()
        config = config_of(family, **changes)
        tensors = {name: tensor.to(dtype) for name, tensor in random_weights(family, config, seed).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


@pytest.fixture
def chat_templates() -> dict[str, str]:
    """Jinja by the name of our template, as published; of the kinds of tools those that can be trained."""
    files = (Path(__file__).parent / "chat_templates").glob("*.jinja")
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@pytest.fixture
def spawn() -> Generator[Callable[..., "subprocess.Popen[Any]"]]:
    """spawn(words, **how): a process that is gone after the test, also after one that is broken off."""
    with ExitStack() as started:

        def do(words: Sequence[str], **how: Any) -> "subprocess.Popen[Any]":
            process = started.enter_context(subprocess.Popen(words, **how))
            started.callback(process.kill)
            return process

        yield do


@pytest.fixture
def warm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[..., Warm]]:
    """warm(*words): `glm-accelerate words` in a process that starts warm, and is gone after the test."""
    started: list[Warm] = []

    def do(
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        group: bool = False,
        other: Mapping[str, float] | None = None,
        code: str = "",
    ) -> Warm:
        output, room = tmp_path_factory.mktemp("warm"), dict(env or os.environ)
        place = Place(output, cwd or Path.cwd(), room, group, UNMEASURED | (other or {}), code)
        started.append(start(words, place))
        return started[-1]

    yield do
    for command in started:
        command.kill()
        command.process.join()


@pytest.fixture
def mount() -> Generator[Callable[..., Path]]:
    """mount(place, *words): a mount that is gone after the test; skips where mounting is not allowed."""
    done: list[Path] = []

    def do(place: Path, *words: str) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        said = subprocess.run(["mount", *words, str(place)], capture_output=True, text=True, check=False)
        if said.returncode:
            pytest.skip(f"nothing can be mounted here: {said.stderr.strip()}")
        if not any("remount" in word for word in words):
            done.append(place)
        return place

    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only root mounts")
    yield do
    for place in reversed(done):
        subprocess.run(["umount", str(place)], check=True)


ANSWERS = {
    "red": "rot",
    "green": "gruen",
    "blue": "blau",
    "white": "weiss",
    "black": "schwarz",
    "sky": "天空",
}


@pytest.fixture
def tiny_run(tmp_path: Path) -> dict[str, object]:
    """A config, as data, for a run of seconds: a tiny GLM-4-0414 with its tokenizer, and 22 conversations."""
    words = [*ANSWERS, *ANSWERS.values(), *["Say", "in", "German", "and", "the", "words"]]
    model = write_tiny(
        tmp_path / "model", words, size=Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    )
    lines = []
    for number in range(22):
        picked = [list(ANSWERS)[(number * 5 + i * i) % 6] for i in range(1 + number % 7)]
        question = f"Say in German: {' and '.join(picked)}"
        answer = " ".join(ANSWERS[word] for word in picked)
        lines.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        )
    for name, part in (("train", lines), ("dev", lines[3:7])):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in part)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "adapt": {"method": "lora", "rank": 4, "dropout": 0.1},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "dev": str(tmp_path / "dev.jsonl"),
            "max_tokens": 128,
            "workers": 1,
            "cache": str(tmp_path / "cache"),
        },
        "train": {"steps": 14, "step_samples": 4},
        "optim": {"learning_rate": 1e-2},
        "evaluate": {"every": 5, "metrics": ["loss", "exact_match"], "max_new_tokens": 8},
        "checkpoint": {"every": 3},
    }
