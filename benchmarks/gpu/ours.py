"""One training job our way, at full size: speed, use of the device, memory, and where a step's time goes."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.gpu.cases import Case, config_of, figures_of, peak_seconds, steps_of, warmup
from benchmarks.gpu.finding import Finding
from benchmarks.gpu.memory import peak_bytes, start_peak
from benchmarks.gpu.model import random_decoder
from benchmarks.race.samples import Tokens
from glm_accelerate.bench.breakdown import profiled
from glm_accelerate.bench.peak import peak
from glm_accelerate.data.pack import pack
from glm_accelerate.data.pipeline import collate
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.models.adapt import LoraSettings, add_lora, quantize
from glm_accelerate.models.bind import bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import float8_products
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.plan.cost import Trained, step_flops
from glm_accelerate.runtime.seed import repeat_exactly
from glm_accelerate.training.step import WholeModel, train_step

LORA = LoraSettings(rank=8, alpha=32, dropout=0.1, targets=("q_proj", "k_proj", "v_proj"))  # as stock
LISTED = 12  # operators of the breakdown


def ours(case: Case, device: torch.device, tiny: bool) -> Iterator[Finding]:
    """A finding for each way to keep activations. The model is made once; what trains begins anew."""
    torch.manual_seed(0)
    model = model_of(case, device, tiny)
    best = peak(device, "bfloat16", peak_seconds(tiny))
    again = len(case.recompute) > 1
    first = {name: p.detach().to("cpu", copy=True) for name, p in trained_of(model)} if again else {}
    for recompute in case.recompute:
        if recompute is not case.recompute[0]:
            with torch.no_grad():
                for name, parameter in trained_of(model):
                    parameter.copy_(first[name])
        model.recompute = recompute
        with repeat_exactly(device):  # as every run does
            figures = train(case, model, device, tiny)
        figures["utilisation"] = figures["flops_per_second"] / best.measured
        if best.data_sheet:
            figures["utilisation_of_data_sheet"] = figures["flops_per_second"] / best.data_sheet
        learns = all(math.isfinite(loss) for loss in figures["losses"])
        yield Finding(f"{case.name} ours, recompute {'on' if recompute else 'off'}", learns, figures)


def trained_of(model: Decoder) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def model_of(case: Case, device: torch.device, tiny: bool) -> Decoder:
    """With what trains in float32, as `adapt` leaves it."""
    full = case.method == "full"
    model = random_decoder(config_of(case, tiny), device, torch.float32 if full else torch.bfloat16)
    if case.base == "nf4":
        quantize(model, "nf4")
    if not full:
        add_lora(model, replace(LORA, targets="all-linear") if case.all else LORA)
    if case.fp8:
        float8_products(model, simulated=device.type != "cuda")
    model.train()
    return model


def train(case: Case, model: Decoder, device: torch.device, tiny: bool) -> dict[str, Any]:
    """All steps, and one more under the profiler."""
    samples = steps_of(case, tiny)
    trained = [parameter for _, parameter in trained_of(model)]
    optimizer = AdamW(trained, lr=5e-4 if case.method == "lora" else 5e-5, weight_decay=0.0, fused=True)
    held = sum(parameter.nbytes for parameter in model.parameters())
    torch.manual_seed(0)  # the same dropout with and without recomputing
    seconds: list[float] = []
    losses: list[float] = []
    start_peak(device)
    for number, taken in enumerate(samples, 1):
        step = packed(taken, number, case.row)
        began = time.perf_counter()
        losses.append(one(model, optimizer, step, device))
        seconds.append(time.perf_counter() - began)
    most = peak_bytes(device)

    def last() -> float:
        one(model, optimizer, packed(samples[-1], len(samples), case.row), device)
        return 0.0  # nothing was waited for

    spent = profiled(last, device)
    sizes = model.sizes
    return figures_of(samples, seconds, lambda step: flops(sizes, case, step), warmup(tiny)) | {
        "about": case.about,
        "parameters": shapes_of(sizes).parameters,
        "trained": sum(parameter.numel() for parameter in trained),
        "losses": losses,
        "weights_bytes": held,
        "peak_bytes": most,
        "peak_above_weights": None if most is None else most - held,
        "useful": useful(samples, case.row),
        "operators": [f"{choice.operator}: {choice.path}" for choice in bound(model)],
        "breakdown": asdict(replace(spent, operators=spent.operators[:LISTED])),
    }


def one(model: Decoder, optimizer: AdamW, step: Step, device: torch.device) -> float:
    """One update to its end."""
    rate = optimizer.param_groups[0]["lr"]
    outcome = train_step(WholeModel(model, device), mover_of(optimizer, clip=1.0), step, rate)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return outcome.loss


def packed(taken: Sequence[Tokens], number: int, row: int) -> Step:
    samples = [Sample(each.tokens, each.targets, FilePlace("random", 1)) for each in taken]
    batches = tuple(
        collate(arrangement, samples) for arrangement in pack([len(each) for each in samples], row)
    )
    tokens, targets = sum(batch.tokens for batch in batches), sum(batch.targets for batch in batches)
    return Step(number, 0, batches, tuple(range(len(samples))), tokens, targets)


def useful(steps: Sequence[Sequence[Tokens]], row: int) -> float:
    """The share of computed positions that are tokens."""
    lengths = [[len(sample.tokens) for sample in step] for step in steps]
    return sum(map(sum, lengths)) / sum(row_.area for step in lengths for row_ in pack(step, row))


def flops(sizes: Sizes, case: Case, step: Sequence[Tokens]) -> float:
    lengths = [len(sample.tokens) for sample in step]
    return step_flops(sizes, Trained(case.method), lengths, sum(int(one.targets[1:].sum()) for one in step))
