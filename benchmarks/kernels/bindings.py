"""Which kernels bind in every family, method and mode here, read from the backward pass of a model that ran,
and held against what the start of a run prints (`models.bind.bound`). Exits 1 where they differ.

    python -m benchmarks.kernels.bindings --out benchmarks/results
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.model import GLM_4_9B_0414, random_decoder
from benchmarks.race.report import origin, publish
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.bind import bind_operators, bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout

# Heads as wide as the real ones, on which kernels depend; the rest is small.
SMALL = GLM_4_9B_0414 | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "padded_vocab_size": 512,
    "hidden_size": 256,
    "ffn_hidden_size": 384,
    "num_layers": 1,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 128,
    "add_qkv_bias": True,
}
FAMILIES = {"GLM-4-9B": SMALL | {"model_type": "glm"}, "GLM-4-0414": SMALL, "ChatGLM3-6B": CHATGLM}
METHODS = {
    "LoRA": AdaptSection(method="lora"),
    "QLoRA": AdaptSection(method="lora", base="nf4"),
    "full": AdaptSection(method="full"),
}
# An operator's own backward passes, by the file of ours that each form of it is in.
FORMS = {
    "norm": ("rms_norm", "triton_rms_norm"),
    "swiglu": ("swiglu", "triton_swiglu"),
    "rotary positions": ("rope", "triton_rope"),
}


@dataclass(frozen=True)
class Line:
    """One operator of one model."""

    family: str
    method: str
    mode: str
    operator: str
    path: str
    why: str
    ok: bool  # what ran is what is said


def passes(out: Tensor) -> set[str]:
    """The files of all own backward passes that made `out`."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            own = getattr(type(node), "_forward_cls", None)
            found |= {own.__module__.rpartition(".")[2]} if own else set()
    return found


def loss(model: Decoder, device: torch.device) -> Tensor:
    tokens = torch.arange(48, device=device)[None]
    hidden_SH = model.hidden(tokens, Layout.of_documents([(20, 28)], device))[0]
    return linear_cross_entropy(hidden_SH, model.head.weight, tokens[0], model.form)


def lines(device: torch.device) -> Iterator[Line]:
    for family, config in FAMILIES.items():
        for method, section in METHODS.items():
            torch.manual_seed(0)
            model = random_decoder(config, device)
            adapt(model, section)
            bind_operators(model)
            for mode, training in (("training", True), ("evaluation", False)):
                total = loss(model.train(training), device)
                ran = passes(total)
                total.backward()
                for choice in bound(model, training=training):
                    eager, triton = FORMS.get(choice.operator, ("", ""))
                    said = triton if choice.path.startswith("Triton") else eager
                    ok = not eager or {eager, triton} & ran == {said}
                    yield Line(family, method, mode, choice.operator, choice.path, choice.why, ok)


def table(found: Sequence[Line]) -> str:
    rows = [
        "| family | method | mode | operator | path | why | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        said = f"{one.family} | {one.method} | {one.mode} | {one.operator} | {one.path} | {one.why}"
        rows.append(f"| {said} | {'' if one.ok else 'DIFFERS'} |")
    return "\n".join(rows) + "\n"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Which kernels bind in every family, method and mode.")
    parser.add_argument("--out", type=Path, help="directory for the Markdown and JSON; default: only print")
    given = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = origin(["python", "-m", "benchmarks.kernels.bindings", *words], {"torch": torch.__version__})
    found = list(lines(device))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    head = f"# Kernels that bind\n\n- {source.date}; {gpu}; {source.machine}\n- `{source.command}`\n"
    text = f"{head}- commit {source.commit}; torch {torch.__version__}\n\n{table(found)}"
    print(text)
    if given.out is not None:
        publish(given.out, "kernels-bindings", source, text, {"lines": [asdict(line) for line in found]})
    return 1 if any(not line.ok for line in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
