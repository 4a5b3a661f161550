"""Ratio and speed of zstd with byte planes on a briefly trained model's weights and moments.

python -m benchmarks.checkpoint.codec --out benchmarks/results
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import origin, page, publish, table
from glm_accelerate.checkpoint.codec import decode, encode, measure
from glm_accelerate.checkpoint.staging import as_bytes


def train(steps: int, width: int) -> dict[str, Tensor]:
    """A small network learns a random teacher's answers; returned are its tensors, each kind as one."""
    torch.manual_seed(0)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    teacher, model = network(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        given = torch.randn(32, width)
        with torch.no_grad():
            wanted = teacher(given)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        optimizer.step()

    def together(of: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([of(parameter).flatten() for parameter in model.parameters()]).detach()

    return {
        "bf16 weights": together(lambda p: p.bfloat16()),
        "fp32 weights": together(lambda p: p),
        "Adam, first moment": together(lambda p: optimizer.state[p]["exp_avg"]),
        "Adam, second moment": together(lambda p: optimizer.state[p]["exp_avg_sq"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, tensor in train(args.steps, args.width).items():
        content, item = as_bytes(tensor), tensor.element_size()
        speed, ratio = measure(content, item)
        packed = encode(content, item)
        began = time.perf_counter()
        assert decode(packed, item, len(content)) == content
        back = len(content) / 1e6 / (time.perf_counter() - began)
        plain = len(encode(content, 1)) / len(content)
        sizes = {"megabytes": len(content) / 1e6, "ratio": ratio, "plain": plain}
        rows.append({"name": name, **sizes, "compress": speed, "decompress": back})
    source = origin(
        ["python", "-m", "benchmarks.checkpoint.codec", *sys.argv[1:]], {"torch": torch.__version__}
    )
    columns = ("", "MB", "ratio", "without planes", "MB/s in", "MB/s out")
    formats = ("", ".1f", ".3f", ".3f", ".0f", ".0f")
    body = table(columns, (map(format, row.values(), formats) for row in rows))
    text = page("Compression of checkpoints", source, ["one thread"], body)
    publish(args.out, "checkpoint-codec", source, text, {"rows": rows})


if __name__ == "__main__":
    main()
