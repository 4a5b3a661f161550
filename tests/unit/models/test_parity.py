"""Our models against transformers and PEFT on randomised weights: the parity table. `pytest -s` prints it."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from glm_accelerate.models.adapt import LoraSettings, add_lora, merge
from glm_accelerate.models.adapter_files import load_adapter, save_adapter
from glm_accelerate.models.weights import load_model
from glm_accelerate.models.write import save_model

logging.set_verbosity_error()
logging.disable_progress_bar()

FAMILIES = ("chatglm", "glm", "glm4")
LENGTHS = (7, 20, 1, 13)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """What transformers and PEFT warn about in their own code is not ours to fail on."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)


def report(family: str, what: str, error: float, bound: float) -> None:
    print(f"| {family:8} | {what:34} | {error:9.2e} | {bound:7.0e} |")
    assert error <= bound


def theirs(directory: Path, tmp_path: Path, family: str, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model. It has no `chatglm`, so that one is opened as we export it."""
    if family == "chatglm":
        directory, source = tmp_path / "as-glm", directory
        if not directory.exists():
            save_model(load_model(source), directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def tokens(shape: tuple[int, int], seed: int = 1) -> Tensor:
    return torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(seed))


def renamed(name: str, module: torch.nn.Module) -> str:
    """transformers' name of one of our parameters."""
    return {"embed": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}.get(name, f"model.{name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_float64(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_model(family)
    ours = load_model(directory, dtype=torch.float64)
    reference = theirs(directory, tmp_path, family, torch.float64)
    with torch.no_grad():
        report(
            family, "logits, float64", apart(ours(tokens((2, 41))), reference(tokens((2, 41))).logits), 1e-6
        )
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        packed = tokens((1, sum(LENGTHS)))
        theirs_packed = reference(packed, position_ids=positions, use_cache=False).logits
        report(family, "packed logits, float64", apart(ours(packed, positions), theirs_packed), 1e-6)
        alone = torch.cat([ours(part) for part in packed.split(LENGTHS, dim=1)], dim=1)
        report(family, "packed against separate, float64", apart(ours(packed, positions), alone), 1e-12)


def chatglm_by_definition(state: dict[str, Tensor], config: dict[str, Any], batch: Tensor) -> Tensor:
    """ChatGLM's published model on the checkpoint's own tensors, as formulas: what our decoder must equal."""
    N, K, D = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    T = batch.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["layernorm_epsilon"]).sqrt() * state[name]

    frequencies = (1e4 * config["rope_ratio"]) ** -(
        torch.arange(0, D // 2, 2, dtype=torch.float64) / (D // 2)
    )
    turns = torch.polar(torch.ones(T, D // 4, dtype=torch.float64), torch.arange(T)[:, None] * frequencies)

    def rotate(
        x: Tensor,
    ) -> Tensor:  # pairs of neighbours as complex numbers; the second half of a head stays
        pairs = torch.view_as_complex(x[..., : D // 2].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turns[None, :, None]).flatten(-2)
        return torch.cat((turned, x[..., D // 2 :]), -1)

    x = state["transformer.embedding.word_embeddings.weight"][batch]
    for layer in range(config["num_layers"]):
        own = f"transformer.encoder.layers.{layer}"
        matrix, bias = (state[f"{own}.self_attention.query_key_value.{kind}"] for kind in ("weight", "bias"))
        rows = norm(x, f"{own}.input_layernorm.weight") @ matrix.T + bias
        q, k, v = (part.unflatten(-1, (-1, D)) for part in rows.split((N * D, K * D, K * D), -1))
        k, v = (part.repeat_interleave(N // K, 2) for part in (rotate(k), v))
        scores = torch.einsum("btnd,bsnd->bnts", rotate(q), k) / D**0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        attended = torch.einsum("bnts,bsnd->btnd", scores, v).flatten(2)
        x = x + attended @ state[f"{own}.self_attention.dense.weight"].T
        gate, up = (
            norm(x, f"{own}.post_attention_layernorm.weight") @ state[f"{own}.mlp.dense_h_to_4h.weight"].T
        ).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ state[f"{own}.mlp.dense_4h_to_h.weight"].T
    return norm(x, "transformer.encoder.final_layernorm.weight") @ state["transformer.output_layer.weight"].T


def test_chatglm_by_definition(make_model: Callable[..., Path]) -> None:
    directory = make_model("chatglm")
    state = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    config = json.loads((directory / "config.json").read_text())
    expected = chatglm_by_definition(state, config, tokens((2, 41)))
    with torch.no_grad():
        logits = load_model(directory, dtype=torch.float64)(tokens((2, 41)))
    report("chatglm", "logits by definition, float64", apart(logits, expected), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_float32(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_model(family)
    ours = load_model(directory).requires_grad_(True)
    reference = theirs(directory, tmp_path, family, torch.float32)
    batch = tokens((2, 41))
    expected = reference(batch, labels=batch).loss
    expected.backward()
    logits = ours(batch)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    report(family, "loss, float32", apart(loss, expected), 1e-5)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    worst = 0.0
    for name, parameter in ours.named_parameters():
        if "query_key_value" in name:
            parts = [
                gradients[renamed(name.replace("query_key_value", f"{part}_proj"), ours)] for part in "qkv"
            ]
            wanted = torch.cat(parts)
        else:
            wanted = gradients[renamed(name, ours)]
        assert parameter.grad is not None
        worst = max(worst, apart(parameter.grad, wanted) / wanted.abs().max().item())
    report(family, "every gradient, float32, relative", worst, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_round_trip(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_model(family)
    ours = load_model(directory)
    save_model(ours, tmp_path / "hf")
    save_model(ours, tmp_path / "original", layout="original")
    batch = tokens((2, 30))
    with torch.no_grad():
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
        report(family, "exported, opened by transformers", apart(opened(batch).logits, ours(batch)), 1e-5)
        report(
            family, "exported as hf, read back", apart(load_model(tmp_path / "hf")(batch), ours(batch)), 2e-6
        )
        back = load_model(tmp_path / "original")
        report(family, "exported as it came, read back", apart(back(batch), ours(batch)), 0.0)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_lora_both_ways(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_model(family)
    reference = theirs(directory, tmp_path, family, torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(reference, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    adapted.save_pretrained(tmp_path / "peft")
    ours = load_model(directory).eval()
    load_adapter(ours, tmp_path / "peft")
    batch = tokens((2, 30))
    expected = adapted.eval()(batch, labels=batch)
    expected.loss.backward()
    logits = ours(batch)
    report(family, "LoRA from PEFT, logits", apart(logits, expected.logits), 1e-4)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    wanted = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert len(wanted) == len(mine) == 2 * 6 * 3
    worst = 0.0
    for name, gradient in mine.items():
        other = wanted[f"base_model.model.model.{name}.default.weight"]
        worst = max(worst, apart(gradient, other) / other.abs().max().item())
    report(family, "LoRA gradients, relative", worst, 1e-4)
    save_adapter(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    opened = PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    with torch.no_grad():
        report(family, "LoRA to PEFT, logits", apart(opened(batch).logits, logits), 1e-4)
        merge(ours)
        report(family, "LoRA merged, logits", apart(ours(batch), logits), 1e-4)


def test_chatglm_adapter_stays_fused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """ChatGLM's own name for the fused layer is understood, and is what stands in the file."""
    model = load_model(make_model("chatglm"))
    add_lora(model, LoraSettings(rank=2, targets=["query_key_value"]), seed=5)
    save_adapter(model, tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    prefix = "base_model.model.transformer.encoder.layers"
    assert names == {
        f"{prefix}.{layer}.self_attention.query_key_value.lora_{matrix}.weight"
        for layer in range(3)
        for matrix in "AB"
    }
