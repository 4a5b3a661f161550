"""A quantised base: how near it is, that it computes what its wide weights would, and what it costs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import AdaptSection, RunConfig
from glm_accelerate.export.export import export
from glm_accelerate.kernels.linear import add_adapter
from glm_accelerate.kernels.quantized import (
    BLOCK,
    Kind,
    Packed,
    nf4_path,
    pack,
    quantized_linear,
    unpack,
)
from glm_accelerate.models.adapt import adapt, adapted_layers, count, merge
from glm_accelerate.models.adapter_files import load_adapter, save_adapter
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import PackedWeight, linear_layers
from glm_accelerate.models.weights import load_model
from glm_accelerate.models.write import save_model
from glm_accelerate.prove.model import prove_coverage
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train

KINDS: tuple[Kind, ...] = ("nf4", "int8", "fp8")
FAMILIES = ("glm4", "chatglm", "glm")
CPU = torch.device("cpu")
# Of normal weights: root mean square of what is lost, in standard deviations; and bits a weight.
NEARNESS = {"nf4": (0.085, 0.095), "int8": (0.004, 0.01), "fp8": (0.02, 0.03)}
BITS = {"nf4": (4.1, 4.2), "int8": (8.0, 8.02), "fp8": (8.0, 8.02)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lost(kind: Kind, weight: Tensor) -> float:
    back = unpack(pack(kind, weight), torch.float32)
    return float((back - weight).square().mean().sqrt() / weight.square().mean().sqrt())


def parts(packed: Packed) -> list[Tensor]:
    return [part for part in (packed.codes_OP, packed.scales, packed.levels_OK) if part is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_and_what_it_takes(kind: Kind) -> None:
    weight = drawn(512, 2048) * 0.02
    low, high = NEARNESS[kind]
    assert low < lost(kind, weight) < high
    low, high = BITS[kind]
    assert low < 8 * sum(part.nbytes for part in parts(pack(kind, weight))) / weight.numel() < high


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_rounded_once(kind: Kind, dtype: torch.dtype) -> None:
    """In whatever it computes in, odd widths included."""
    packed = pack(kind, drawn(7, 3 * BLOCK + 5))
    exact = unpack(packed, torch.float32)
    assert exact.shape == (7, 3 * BLOCK + 5)
    assert torch.equal(unpack(packed, dtype), exact.to(dtype))
    assert (unpack(packed, torch.float64) - exact).abs().max() < 1e-6  # what float32 rounds


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_each_other(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed in parts or as a whole: the same bits. So ranks can each pack what they hold."""
    weight = drawn(11, 130)
    whole = pack(kind, weight)
    in_one = unpack(whole, torch.float64)
    for one, other in zip(parts(pack(kind, weight[3:8])), parts(whole), strict=True):
        assert torch.equal(one, other[3:8])
    monkeypatch.setattr("glm_accelerate.kernels.quantized.PACKED_AT_ONCE", 300)  # two rows
    monkeypatch.setattr("glm_accelerate.kernels.quantized.UNPACKED_AT_ONCE", 300)
    for one, other in zip(parts(pack(kind, weight)), parts(whole), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(unpack(whole, torch.float64), in_one)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zero_and_damage_shows(kind: Kind) -> None:
    weight = drawn(4, 2 * BLOCK)
    weight[0] = 0.0
    weight[1, :BLOCK] = 0.0
    weight[2] *= 1e-38
    back = unpack(pack(kind, weight), torch.float32)
    assert back.isfinite().all()
    assert torch.equal(back[weight == 0], weight[weight == 0])
    weight[3, 5] = torch.nan
    assert not unpack(pack(kind, weight), torch.float32)[3].isfinite().all()


def test_nf4_is_bitsandbytes_nf4() -> None:
    """The same codes; the largest of each block in 8 bits a row costs no more than in theirs, within 1 %."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = drawn(96, 1024) * (1 + 30 * (drawn(96, 1024, seed=1) > 3.5))  # with outliers, as weights have
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    packed = pack("nf4", weight)
    assert torch.equal(packed.codes_OP.flatten(), codes.flatten())
    codes, state = functional.quantize_4bit(
        weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True
    )
    theirs = functional.dequantize_4bit(codes, state)
    ours = unpack(packed, torch.float32)
    assert (ours - weight).square().mean() < 1.01 * (theirs - weight).square().mean()


def test_the_kernel_gives_what_the_definition_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    assert nf4_path(CPU).path == "bitsandbytes", nf4_path(CPU).why
    packed = pack("nf4", drawn(33, 200))
    by_kernel = {dtype: unpack(packed, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    monkeypatch.setattr("glm_accelerate.kernels.quantized.KERNEL_DTYPES", ())
    for dtype, weight in by_kernel.items():
        assert torch.equal(weight, unpack(packed, dtype))


def test_bitsandbytes_is_used_where_it_can_be_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choose = nf4_path.__wrapped__
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
        assert (choose(CPU).path, "pip install bitsandbytes" in choose(CPU).why) == ("PyTorch", True)
    pytest.importorskip("bitsandbytes")
    with monkeypatch.context() as changed:
        changed.syspath_prepend(tmp_path)
        assert (choose(CPU).path, "code from the network" in choose(CPU).why) == ("PyTorch", True)
    assert choose(CPU).path == "bitsandbytes"


@pytest.mark.process
def test_what_bitsandbytes_says_when_it_is_imported_reaches_nobody() -> None:
    pytest.importorskip("bitsandbytes")
    code = (
        "import torch; from glm_accelerate.kernels.quantized import nf4_path; nf4_path(torch.device('cpu'))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("", "", 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 60), (2, 3, 60)])
def test_products_are_as_near_as_plain_ones(kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """House rule 7, with an adapter on top: err <= 2 x plain PyTorch's + 1 ulp, forward and each gradient."""
    packed = pack(kind, drawn(37, 60))
    exact = [t.double() for t in (drawn(*shape, seed=1), drawn(4, 60, seed=2), drawn(37, 4, seed=3))]
    bias, slope = drawn(37, seed=4), drawn(*shape[:-1], 37, seed=5)

    def run(ours: bool, dtype: torch.dtype) -> list[Tensor]:
        x, A, B = (t.to(dtype).requires_grad_() for t in exact)
        if ours:
            out = add_adapter(quantized_linear(x, packed, bias.to(dtype)), x, A, B, scale=2.0)
        else:
            weight = unpack(packed, torch.float64).to(dtype)
            out = nn.functional.linear(x, weight, bias.to(dtype)) + 2.0 * (x @ A.T) @ B.T
        out.backward(slope.to(dtype))
        assert x.grad is not None
        assert A.grad is not None
        assert B.grad is not None
        return [t.detach().double() for t in (out, x.grad, A.grad, B.grad)]

    for ours, plain, truth in zip(
        run(True, dtype), run(False, dtype), run(False, torch.float64), strict=True
    ):
        ulp = torch.finfo(dtype).eps * float(truth.abs().max())
        assert (ours - truth).abs().max() <= 2 * (plain - truth).abs().max() + ulp


def section(kind: str, method: str = "lora", dropout: float = 0.0) -> AdaptSection:
    return AdaptSection.model_validate({"method": method, "base": kind, "rank": 3, "dropout": dropout})


def wake(model: Decoder) -> None:
    """As after some training: B is not zero any more."""
    generator = torch.Generator().manual_seed(7)
    for _, layer in adapted_layers(model):
        layer.lora_B.data.normal_(0, 0.1, generator=generator)


def quantized(directory: Path, kind: Kind, dropout: float = 0.0, device: str = "cpu") -> Decoder:
    model = load_model(directory, quantized=kind, device=device)
    adapt(model, section(kind, dropout=dropout), seed=3)
    wake(model)
    return model


def widened(directory: Path, kind: Kind, dropout: float = 0.0) -> Decoder:
    """A plain LoRA model whose weights are what the quantised ones stand for."""
    model = load_model(directory)
    for _, layer in linear_layers(model):
        layer.weight.data = unpack(pack(kind, layer.weight.data), torch.float32)
    adapt(model, section("auto", dropout=dropout), seed=3)
    wake(model)
    return model


def logits_and_gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    torch.manual_seed(11)  # the masks of dropout
    logits = model((torch.arange(36) % 131).view(2, 18))
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_it_computes_what_its_wide_weights_do(
    kind: Kind, family: str, recompute: bool, make_model: Callable[..., Path]
) -> None:
    directory = make_model(family)
    ours, plain = quantized(directory, kind, 0.2), widened(directory, kind, 0.2)
    ours.recompute = plain.recompute = recompute
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
        n for n, p in plain.named_parameters() if p.requires_grad
    }
    (logits, gradients), (wanted, theirs) = logits_and_gradients(ours), logits_and_gradients(plain)
    assert torch.equal(logits, wanted)
    assert gradients.keys() == theirs.keys()
    assert len(gradients) == 2 * len(linear_layers(plain))
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-4, atol=1e-6 * float(theirs[name].abs().max())
        )


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_wide_is_kept_for_the_backward_pass(kind: Kind) -> None:
    packed, x = pack(kind, drawn(256, 256)), drawn(3, 256).requires_grad_()
    A, B = drawn(4, 256).requires_grad_(), drawn(256, 4).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        add_adapter(quantized_linear(x, packed, None), x, A, B, scale=1.0, dropout=0.5)
    small = sum(part.nbytes for part in parts(packed))
    assert small < sum(t.nbytes for t in kept) < small + 32_000  # 256 x 256 in float32 is 262,144


def test_targets_that_are_not_adapted_are_packed_too(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm4"))
    plain = count(model)
    adapt(model, AdaptSection(base="nf4", targets=["q_proj"], rank=2))
    assert all(layer.packed is not None for _, layer in linear_layers(model))
    assert {name.rpartition(".")[2] for name, layer in linear_layers(model) if layer.adapter} == {"q_proj"}
    assert model.head.plain
    assert count(model) == plain + sum(a.lora_A.numel() + a.lora_B.numel() for _, a in adapted_layers(model))
    proof = prove_coverage(model, AdaptSection(base="nf4", targets=["q_proj"], rank=2))
    assert proof.ok, proof.said
    assert f" of {count(model):,} weights train" in proof.said


def test_a_prefix_on_a_quantised_base(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm"), quantized="nf4")
    adapt(model, section("nf4", "prefix"))
    model.train()(torch.arange(9).view(1, 9)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["prefix.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_as_it_is_read_or_afterwards(kind: Kind, make_model: Callable[..., Path]) -> None:
    """And as often as one likes: the same bits, so a resumed run has the base that it had."""
    directory = make_model("chatglm", dtype=torch.bfloat16)
    later = load_model(directory, dtype=torch.float32)
    adapt(later, section(kind), seed=3)
    models = [quantized(directory, kind), quantized(directory, kind), later]
    wake(later)
    first, *others = [dict(model.named_parameters()) for model in models]
    for other in others:
        assert first.keys() == other.keys()
        for name, parameter in first.items():
            assert torch.equal(parameter, other[name].to(parameter.dtype)), name
    empty = quantized(directory, kind, device="meta")
    assert {n: (p.shape, p.dtype) for n, p in empty.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in first.items()
    }


@pytest.mark.parametrize("method", ["full", "freeze"])
def test_what_is_packed_does_not_train(method: str) -> None:
    with pytest.raises(ValueError, match="base nf4 cannot be trained: say method lora or prefix"):
        section("nf4", method)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_moves_to_the_unquantised_base(make_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_model("glm4")
    model = quantized(directory, "nf4")
    save_adapter(model, tmp_path / "adapter")
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < 60_000
    plain = load_model(directory)
    load_adapter(plain, tmp_path / "adapter")
    tokens = torch.arange(12).view(1, 12)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        wanted = theirs.eval()(tokens).logits
        assert (plain.eval()(tokens) - wanted).abs().max() < 1e-4
        assert (
            model.eval()(tokens) - wanted
        ).abs().max() > 1e-3  # it was another base that it was trained on
    merge(plain)
    save_model(plain, tmp_path / "merged")


def test_what_is_packed_is_neither_merged_nor_saved(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(make_model("glm"), quantized="int8")
    with pytest.raises(UserError, match="the model is quantised"):
        save_model(model, tmp_path / "out")
    adapt(model, section("int8"))
    with pytest.raises(UserError, match="merge into the model as its files have it"):
        merge(model)


LOADING = """
import sys, threading, time, torch
torch.set_num_threads(1)
from glm_accelerate.models.weights import load_model

def resident():  # without pages of files, which the system takes back when it wants to
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.001)

before, done = resident(), threading.Event()
peak = [before]
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], dtype=torch.bfloat16, quantized="nf4")
done.set()
watcher.join()
size = sum(parameter.nbytes for parameter in model.parameters())
print(peak[0] - before, size)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_quantised_model_and_one_layer(make_model: Callable[..., Path]) -> None:
    """52 M weights, 104 MB in their file; the widest layer has 8 MB of it."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 256}
    directory = make_model("glm4", dtype=torch.bfloat16, **sizes, head_dim=64, num_attention_heads=16)

    command = [sys.executable, "-c", LOADING, str(directory)]
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc: what is freed is not kept
    peak, size = map(int, subprocess.check_output(command, text=True, env=given_back).split())
    assert size < 0.27 * (directory / "model.safetensors").stat().st_size
    assert peak < size + 40_000_000  # a layer and float32 copies of the rows that are packed at once


def test_parts_of_a_packed_weight_are_its_rows(make_model: Callable[..., Path]) -> None:
    model = quantized(make_model("glm4"), "nf4")
    for module in model.modules():
        if isinstance(module, PackedWeight):
            assert {len(parameter) for parameter in module.parameters()} == {len(module.codes)}


def run_of(tiny_run: dict[str, Any], kind: Kind) -> RunConfig:
    adapter = {"method": "lora", "rank": 4, "dropout": 0.2, "base": kind}
    return RunConfig.model_validate({**tiny_run, "adapt": adapter, "evaluate": {"every": 4}})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_interrupted_and_gone_on_with_is_the_same_to_the_bit(
    kind: Kind, tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    """The base is packed again; a checkpoint holds the adapter and its moments, and nothing of the base."""
    config = run_of(tiny_run, kind)
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", stop_after=5)
    assert train(config, tmp_path / "parts").losses == whole.losses
    assert whole.losses[14] < whole.losses[0]
    with pytest.raises(UserError, match="precision"):  # on another base its numbers are others
        train(run_of(tiny_run, "int8" if kind == "nf4" else "nf4"), tmp_path / "whole")
    one, other = (Reader(tmp_path / run / "checkpoints/checkpoint-14") for run in ("whole", "parts"))
    assert {name.rpartition(".")[2] for name in one.names("weights")} == {"lora_A", "lora_B"}
    for group in ("weights", "optimizer"):
        assert one.names(group) == other.names(group)
        for name in one.names(group):
            assert torch.equal(one.tensor(group, name), other.tensor(group, name)), name


def test_a_run_is_exported_on_the_base_as_its_files_have_it(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    train(run_of(tiny_run, "nf4"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "merged", merge_adapter=True)
    export(tmp_path / "run", tmp_path / "adapter", merge_adapter=False)
    wanted = load_model(tiny_run["model"]["path"])
    load_adapter(wanted, tmp_path / "adapter")
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        logits = wanted.eval()(tokens)
        assert (load_model(tmp_path / "merged").eval()(tokens) - logits).abs().max() < 1e-5
        assert (load_model(tiny_run["model"]["path"]).eval()(tokens) - logits).abs().max() > 1e-3
