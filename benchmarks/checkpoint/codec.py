"""Ratio and speed of zstd with byte planes on a briefly trained model's weights and moments.

python -m benchmarks.checkpoint.codec --out benchmarks/results/NAME
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.race.report import origin
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
    parser.add_argument("--out", type=Path, help="NAME for NAME.json and NAME.md")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, tensor in train(args.steps, args.width).items():
        content, item = as_bytes(tensor), tensor.element_size()
        speed, ratio = measure(content, item)
        packed = encode(content, item)
        began = time.perf_counter()
        assert decode(packed, item, len(content)) == content
        back = len(content) / 1e6 / (time.perf_counter() - began)
        plain = len(encode(content, 1)) / len(content)
        megabytes = len(content) / 1e6
        row = {"megabytes": megabytes, "ratio": ratio, "plain": plain, "compress": speed, "decompress": back}
        rows.append({"name": name, **row})
    lines = [
        "| | MB | ratio | without planes | MB/s in | MB/s out |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        "| {name} | {megabytes:.1f} | {ratio:.3f} | {plain:.3f} | {compress:.0f} | {decompress:.0f} |".format(
            **row
        )
        for row in rows
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    if args.out:
        command = ["python", "-m", "benchmarks.checkpoint.codec", *sys.argv[1:]]
        source = origin(command, {"torch": torch.__version__})
        args.out.with_suffix(".json").write_text(
            json.dumps({"origin": asdict(source), "rows": rows}, indent=1) + "\n"
        )
        head = (
            f"- {source.date}; {source.machine}; one thread\n- `{source.command}`\n- commit {source.commit}\n"
        )
        args.out.with_suffix(".md").write_text(f"# Compression of checkpoints\n\n{head}\n{table}")


if __name__ == "__main__":
    main()
