"""A real run of the stock way, continued: what follows is what stock's own continuation gave."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import PrinterCallback

from glm_accelerate.assemble import foreign
from glm_accelerate.assemble.foreign import ForeignCheckpoint, is_foreign, read_foreign
from glm_accelerate.checkpoint.pickled import unpickle
from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.optim.schedule import rate
from glm_accelerate.runtime.errors import UserError

STEPS, SAVED, BATCH, RATE = 6, 3, 2, 1e-2
SECTIONS = {
    "lora": AdaptSection(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "k_proj", "v_proj", "down_proj"]),
    "full": AdaptSection(method="full"),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """What transformers and PEFT warn about in their own code is not ours to fail on."""
    warnings.simplefilter("ignore")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child costs seconds; one test has the real one."""
    monkeypatch.setattr(
        foreign, "unpickle_apart", lambda kind, pickled, target, cure: unpickle(kind, pickled, target)
    )


def samples() -> list[dict[str, list[int]]]:
    drawn = torch.randint(3, 131, (STEPS * BATCH, 24), generator=torch.Generator().manual_seed(9)).tolist()
    return [{"input_ids": row, "labels": row} for row in drawn]


def stock(model_dir: Path, out: Path, method: str) -> tuple[Path, list[float]]:
    """Trains as the stock script does; returns the checkpoint half-way, and every step's loss."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, use_cache=False, dtype=torch.float32)
    section = SECTIONS[method]
    torch.manual_seed(0)  # of PEFT's matrices
    if method == "lora":
        config = LoraConfig(
            r=section.rank, lora_alpha=section.alpha, lora_dropout=0.0, target_modules=list(section.targets)
        )
        model = get_peft_model(model, config)
    losses: list[float] = []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    arguments = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, learning_rate=RATE, per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential", save_steps=SAVED, logging_steps=1, report_to="none",
        disable_tqdm=True, use_cpu=True, weight_decay=0.1, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=default_data_collator,
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return out / f"checkpoint-{SAVED}", losses


def go_on(model_dir: Path, section: AdaptSection, begun: ForeignCheckpoint) -> list[float]:
    """Our own parts from there to the end, on the batches that stock had."""
    model = load_model(model_dir, dtype=torch.float32)
    adapt(model, section)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == begun.weights.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(begun.weights[name])
    optimizer = build_optimizer(model.named_parameters(), OptimSection(learning_rate=RATE, weight_decay=0.1))
    mover = mover_of(optimizer, clip=1.0)
    mover.load(model.named_parameters(), begun.optimizer)
    data = samples()
    losses: list[float] = []
    for step in range(begun.step, STEPS):
        batch = torch.tensor([row["input_ids"] for row in data[step * BATCH : (step + 1) * BATCH]])
        loss = cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        height = rate(step, STEPS, schedule="linear", warmup=0, decay=0.2, floor=0.0)
        mover.begin(RATE * height)
        mover.move(mover.norm())
        mover.end()
        losses.append(loss.item())
    return losses


def apart(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == STEPS - SAVED
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("family", "method"), [("glm4", "lora"), ("glm4", "full"), ("glm", "full")])
def test_the_loss_goes_on_as_stocks(
    family: str, method: str, make_model: Callable[..., Path], tmp_path: Path, in_this_process: None
) -> None:
    model_dir = make_model(family)
    checkpoint, losses = stock(model_dir, tmp_path / "out", method)
    assert is_foreign(checkpoint)
    begun = read_foreign(checkpoint, model_dir, SECTIONS[method], tmp_path)
    assert begun.step == SAVED
    assert len(begun.optimizer) == 3 * len(begun.weights)
    assert [note for note in begun.notes if "train.steps=6" in note]
    assert apart(go_on(model_dir, SECTIONS[method], begun), losses[SAVED:]) < 1e-4
    forgetful = ForeignCheckpoint(begun.step, begun.weights, {}, [])  # so the comparison can see the moments
    assert apart(go_on(model_dir, SECTIONS[method], forgetful), losses[SAVED:]) > 1e-3
    assert not list(tmp_path.glob(".stock.*"))


@pytest.fixture
def checkpoint(make_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """(checkpoint, model) of a LoRA run, with files as stock writes them, made without training."""
    model_dir = make_model("glm4")
    directory = tmp_path / "checkpoint-3"
    model = load_model(model_dir)
    adapt(model, SECTIONS["lora"])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = {f"base_model.model.model.{name}.weight": model.get_parameter(name).shape for name in names}
    directory.mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, directory / foreign.WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    (directory / foreign.CONFIG).write_text(json.dumps(config))
    (directory / foreign.STATE).write_text(json.dumps({"global_step": 3, "max_steps": 6}))
    return directory, model_dir


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_without_moments_the_weights_go_on(
    checkpoint: tuple[Path, Path], tmp_path: Path, in_this_process: None
) -> None:
    directory, model_dir = checkpoint
    begun = read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path)
    assert begun.optimizer == {}
    assert [note for note in begun.notes if "no optimizer.pt" in note]
    for moments in ({"exp_avg": torch.zeros(3, 5)}, {"momentum_buffer": torch.zeros(4, 60)}):
        count = len(begun.weights)
        state = {
            "state": dict.fromkeys(range(count), moments),
            "param_groups": [{"params": list(range(count))}],
        }
        torch.save(state, directory / foreign.OPTIMIZER)
        begun = read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path)
        assert begun.optimizer == {}
        assert begun.notes[-1].startswith("optimizer.pt does not match")


def test_another_adapter_is_refused_with_the_words_to_type(
    checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, model_dir = checkpoint
    wanted = (
        r"another adapter .*adapt.rank=4 adapt.alpha=8 "
        r"adapt.targets='\[down_proj, k_proj, q_proj, v_proj\]'"
    )
    for change in ({"rank": 8}, {"alpha": 32.0}, {"targets": ["q_proj"]}):
        section = SECTIONS["lora"].model_copy(update=change)
        with pytest.raises(UserError, match=wanted):
            read_foreign(directory, model_dir, section, tmp_path)
    section = SECTIONS["lora"].model_copy(update={"dropout": 0.1})
    assert "dropout was 0 and is 0.1" in " ".join(read_foreign(directory, model_dir, section, tmp_path).notes)
    rewrite(directory / foreign.CONFIG, use_rslora=True)  # then it is scaled by 8 / sqrt(4)
    section = SECTIONS["lora"].model_copy(update={"alpha": 8 * math.sqrt(4)})
    assert read_foreign(directory, model_dir, section, tmp_path).step == 3
    rewrite(directory / foreign.CONFIG, use_dora=True)
    with pytest.raises(UserError, match="adapters with use_dora"):
        read_foreign(directory, model_dir, section, tmp_path)
    rewrite(directory / foreign.CONFIG, use_dora=False, peft_type="PREFIX_TUNING")
    with pytest.raises(UserError, match="adapters of type PREFIX_TUNING"):
        read_foreign(directory, model_dir, section, tmp_path)


def test_what_cannot_be_gone_on_from(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    directory, model_dir = checkpoint
    with pytest.raises(UserError, match="holds an adapter"):
        read_foreign(directory, model_dir, SECTIONS["full"], tmp_path)
    with pytest.raises(UserError, match=r"adapt\.method freeze cannot"):
        read_foreign(directory, model_dir, AdaptSection(method="freeze"), tmp_path)
    for step in (-1, "3", None, True):
        rewrite(directory / foreign.STATE, global_step=step)
        with pytest.raises(UserError, match="global_step is"):
            read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path)
    (directory / foreign.STATE).write_text("[]")
    with pytest.raises(UserError, match="does not say its step"):
        read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path)
    assert not is_foreign(tmp_path)


@pytest.mark.parametrize("family", ["glm4", "chatglm"])
def test_whole_models_in_shards_and_both_ways_of_grouping(
    family: str, make_model: Callable[..., Path], tmp_path: Path, in_this_process: None
) -> None:
    """Older Trainers decayed norms too. Every tensor gets the moments that were made of itself."""
    model_dir = make_model(family)
    directory = tmp_path / "checkpoint-5"
    shutil.copytree(model_dir, directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(index.values()):
        save_file({name: weights[name].half() for name in weights if index[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / foreign.STATE).write_text(json.dumps({"global_step": 5}))
    for norms_decay in (False, True):
        order = stocks_order(family, weights, norms_decay)
        parameters = [torch.nn.Parameter(weights[name].clone()) for group in order for name in group]
        split = len(order[0])
        groups = [{"params": parameters[:split]}, {"params": parameters[split:], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        torch.save(optimizer.state_dict(), directory / foreign.OPTIMIZER)
        begun = read_foreign(directory, model_dir, SECTIONS["full"], tmp_path)
        assert len(begun.weights) == len(weights)
        assert len(begun.optimizer) == 3 * len(weights)
        for name, weight in begun.weights.items():
            assert torch.allclose(begun.optimizer[f"{name}::exp_avg"], 0.1 * weight.float(), atol=1e-4), name


def stocks_order(family: str, weights: dict[str, Tensor], norms_decay: bool) -> list[list[str]]:
    """Names as transformers' class (and ChatGLM's published one) registers them, decayed ones first."""
    if family == "chatglm":
        inner = [
            *("input_layernorm.weight", "self_attention.query_key_value.weight"),
            *("self_attention.query_key_value.bias", "self_attention.dense.weight"),
            *("post_attention_layernorm.weight", "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"),
        ]
        layers = [f"transformer.encoder.layers.{n}.{name}" for n in range(3) for name in inner]
        last = ["transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight"]
        names = ["transformer.embedding.word_embeddings.weight", *layers, *last]
    else:
        config = AutoModelForCausalLM.from_config
        from transformers import Glm4Config

        with torch.device("meta"):
            model = config(Glm4Config(num_hidden_layers=3, attention_bias=True, tie_word_embeddings=False))
        names = [name for name, _ in model.named_parameters()]
    assert set(names) == set(weights)
    spared = [n for n in names if n.endswith("bias") or ("norm" in n and not norms_decay)]
    return [[name for name in names if name not in spared], spared]


class Bomb:
    """Its unpickling writes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_a_malicious_optimizer_is_refused(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    """In the real child. scheduler.pt and rng_state.pth are never opened at all."""
    directory, model_dir = checkpoint
    canary = tmp_path / "canary"
    torch.save({"state": {0: {"exp_avg": Bomb(canary)}}}, directory / foreign.OPTIMIZER)
    for name in ("scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save(Bomb(canary), directory / name)
    with pytest.raises(UserError, match=r"optimizer\.pt: refused: it asks for posix\.system") as caught:
        read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path)
    assert "remove optimizer.pt" in str(caught.value)
    assert not canary.exists()
    (directory / foreign.OPTIMIZER).unlink()
    assert read_foreign(directory, model_dir, SECTIONS["lora"], tmp_path).optimizer == {}
    assert not canary.exists()
