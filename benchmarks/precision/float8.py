"""Both passes of GLM-4-9B's linear layers in 8 bits against bfloat16: time with the rounding, and errors.

python -m benchmarks.precision.float8 --out benchmarks/results             (on a GPU from Ada on)
python -m benchmarks.precision.float8 --out benchmarks/results --tiny      (anywhere, to see that it runs)
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.kernels.float8 import float8_linear, missing

LAYERS = {"q, k, v": (4096, 4608), "o": (4096, 4096), "gate, up": (4096, 27392), "down": (13696, 4096)}
TINY = {"square": (64, 64), "wide": (64, 192)}
REPEATS, WARMUP = 30, 5


@dataclass(frozen=True)
class Row:
    """One layer: milliseconds of both passes, and errors as a share of the exact result's norm."""

    layer: str
    weight: str  # frozen: the gradient of the activations alone
    bfloat16_ms: float
    fp8_ms: float
    bfloat16_error: float
    fp8_error: float
    to_simulated: float


def both_passes(
    layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, slope: Tensor
) -> list[Tensor]:
    leaves = [x, weight] if weight.requires_grad else [x]
    out = layer(x, weight)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of runs that each wait for the device."""
    times: list[float] = []
    for _ in range(WARMUP + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[WARMUP:])


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The worst of output and gradients."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


def row(name: str, sizes: tuple[int, int], tokens: int, trained: bool, device: torch.device) -> Row:
    inputs, outputs = sizes
    draw = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).bfloat16()

    x, slope = drawn(tokens, inputs).requires_grad_(), drawn(tokens, outputs)
    weight = (drawn(outputs, inputs) / inputs**0.5).requires_grad_(trained)

    def eight(a: Tensor, b: Tensor) -> Tensor:
        return float8_linear(a, b, None)

    def simulated(a: Tensor, b: Tensor) -> Tensor:
        return float8_linear(a, b, None, simulated=True)

    wide = [part.detach().float().requires_grad_(part.requires_grad) for part in (x, weight)]
    exact = both_passes(linear, wide[0], wide[1], slope)
    made = both_passes(eight, x, weight, slope)
    return Row(
        layer=f"{name}, {inputs:,} to {outputs:,}",
        weight="trained" if trained else "frozen",
        bfloat16_ms=milliseconds(lambda: both_passes(linear, x, weight, slope), device),
        fp8_ms=milliseconds(lambda: both_passes(eight, x, weight, slope), device),
        bfloat16_error=apart(both_passes(linear, x, weight, slope), exact),
        fp8_error=apart(made, exact),
        to_simulated=apart(made, both_passes(simulated, x, weight, slope)),
    )


def report(source: Origin, rows: list[Row], tokens: int, device: str) -> str:
    lines = [
        "# Linear layers in 8 bits\n",
        f"- {source.date}; {device}; {source.machine}",
        f"- `{source.command}`",
        f"- commit {source.commit}; torch {source.versions['torch']}\n",
        f"{tokens:,} tokens; forward and backward pass, of fp8 with all its rounding; medians of {REPEATS}.",
        "Errors: of output and gradients the worst, to float32, as a share of its norm.\n",
        "| layer | weight | bfloat16, ms | fp8, ms | faster | error bf16 | error fp8 | fp8 to simulated |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in rows:
        times = f"{each.bfloat16_ms:.3f} | {each.fp8_ms:.3f} | {each.bfloat16_ms / each.fp8_ms:.2f}x"
        errors = f"{each.bfloat16_error:.1e} | {each.fp8_error:.1e} | {each.to_simulated:.1e}"
        lines.append(f"| {each.layer} | {each.weight} | {times} | {errors} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lacking = missing()
    if lacking and not args.tiny:
        sys.exit(f"{lacking}: --tiny runs anywhere")
    device = torch.device("cpu" if lacking else "cuda")
    tokens = 48 if args.tiny else args.tokens
    command = ["python", "-m", "benchmarks.precision.float8", *sys.argv[1:]]
    source = origin(command, {"torch": str(torch.__version__)})
    rows = [
        row(name, sizes, tokens, trained, device)
        for name, sizes in (TINY if args.tiny else LAYERS).items()
        for trained in (False, True)
    ]
    named = "CPU" if lacking else torch.cuda.get_device_name()
    text = report(source, rows, tokens, named)
    publish(
        args.out, "precision-float8", source, text, {"device": named, "rows": [asdict(each) for each in rows]}
    )
    print(text)


if __name__ == "__main__":
    main()
