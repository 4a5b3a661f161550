"""What a frozen base takes, from the shapes of the published models, and what packing loses of drawn weights.

python -m benchmarks.quantized.sizes [--out DIR]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.kernels.quantized import Kind, pack, unpack
from glm_accelerate.models.adapt.quantized import kept_bytes
from glm_accelerate.models.sizes import Sizes

KINDS: tuple[Kind | None, ...] = (None, "int8", "fp8", "nf4")


def sizes(
    vocabulary: int, width: int, mlp: int, layers: int, heads: int, bias: bool, sandwich: bool
) -> Sizes:
    """All of these have two key/value heads, heads of 128, and a head apart from the embedding."""
    return Sizes(
        vocabulary=vocabulary,
        width=width,
        mlp_width=mlp,
        layers=layers,
        heads=heads,
        kv_heads=2,
        head_width=128,
        norm_epsilon=1e-5,
        rope_theta=1e4,
        rope_width=64,
        qkv_bias=bias,
        max_positions=32768,
        sandwich=sandwich,
    )


MODELS = {
    "ChatGLM3-6B": sizes(65024, 4096, 13696, 28, 32, True, False),
    "GLM-4-9B-chat": sizes(151552, 4096, 13696, 40, 32, True, False),
    "GLM-4-9B-0414": sizes(151552, 4096, 13696, 40, 32, True, True),
    "GLM-4-32B-0414": sizes(151552, 6144, 23040, 61, 48, False, True),
}


def blocks_only(model: Sizes) -> int:
    """Weights of the linear layers inside the blocks."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    attention = model.width * (2 * query + 2 * key)
    return model.layers * (attention + 3 * model.width * model.mlp_width)


def rows() -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for name, model in MODELS.items():
        packed = blocks_only(model)
        kept = {kind or "bfloat16": kept_bytes(model, torch.bfloat16, kind) for kind in KINDS}
        rest = kept["bfloat16"] - 2 * packed
        bits = {kind: 8 * (size - rest) / packed for kind, size in kept.items()}
        made.append(
            {"model": name, "weights": model.parameters, "packed": packed, "bytes": kept, "bits": bits}
        )
    return made


def table() -> str:
    kinds = [kind or "bfloat16" for kind in KINDS]
    lines = [
        f"| model | weights, 10^9 | of them packed | {' | '.join(f'{kind}, GB' for kind in kinds)} |",
        "| --- | ---: | ---: |" + " ---: |" * len(kinds),
    ]
    made = rows()
    for row in made:
        kept, bits = row["bytes"], row["bits"]
        assert isinstance(kept, dict)
        assert isinstance(bits, dict)
        figures = " | ".join(f"{kept[kind] / 1e9:.2f} ({bits[kind]:.3f} bits)" for kind in kinds)
        weights, packed = row["weights"], row["packed"]
        assert isinstance(weights, int)
        assert isinstance(packed, int)
        lines.append(f"| {row['model']} | {weights / 1e9:.2f} | {packed / weights:.0%} | {figures} |")
    return "\n".join(lines)


def losses() -> str:
    """Root mean square of what is lost, as a share of the weights'."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 4096, generator=draw)
    outliers = normal * (1 + 30 * (torch.rand(512, 4096, generator=draw) > 0.9995))
    lines = [
        "| base | normal weights | with outliers: 1 in 2,000 is 31 times as large |",
        "| --- | ---: | ---: |",
    ]
    for kind in KINDS[1:]:
        assert kind is not None
        shares = [
            float((unpack(pack(kind, weight), torch.float32) - weight).norm() / weight.norm())
            for weight in (normal, outliers)
        ]
        lines.append(f"| {kind} | {shares[0]:.1%} | {shares[1]:.1%} |")
    return "\n".join(lines)


def report(source: Origin) -> str:
    return "\n".join(
        [
            "# What a frozen base takes\n",
            f"- {source.date}; `{source.command}`; commit {source.commit}\n",
            "From shapes alone. Linear layers inside the blocks are packed; embedding, head, norms and",
            "biases stay in bfloat16. In parentheses: bits for each packed weight, scales included.",
            "Activations, adapters and their moments come on top, and one layer, unpacked, at a time.\n",
            table(),
            "\nLost by packing (root mean square, of a drawn matrix 4,096 wide):\n",
            losses(),
            "",
        ]
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    print(table(), losses(), sep="\n\n")
    if given.out is not None:
        source = origin(["python", "-m", "benchmarks.quantized.sizes", *words], {"torch": torch.__version__})
        publish(given.out, "quantized-sizes", source, report(source), {"models": rows()})


if __name__ == "__main__":
    main(sys.argv[1:])
