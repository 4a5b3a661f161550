"""One training job the stock way, as GLM-4's fine-tune script does it: HF Trainer and PEFT, bfloat16 weights,
padding on the left to the longest of the batch, LoRA 8/32/0.1 on q, k, v, default AdamW, no gradient
checkpointing (QLoRA: PEFT's own preparation, which checkpoints). A step of several batches accumulates.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Trainer,
    TrainingArguments,
)

from benchmarks.gpu.cases import Case, config_of, figures_of, peak_seconds, steps_of, warmup
from benchmarks.gpu.finding import Finding
from benchmarks.gpu.memory import peak_bytes, start_peak
from benchmarks.race.samples import Tokens
from benchmarks.race.stock import Watch, row, with_lora
from glm_accelerate.bench.peak import peak
from glm_accelerate.models.families import family_of
from glm_accelerate.plan.cost import Trained, step_flops

IGNORED = -100


class InOrder(Trainer):
    """Samples come as they lie, so that both sides learn the same ones in a step."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        assert self.train_dataset is not None
        return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]


def stock(case: Case, device: torch.device, tiny: bool) -> Iterator[Finding]:
    torch.manual_seed(0)
    config = config_of(case, tiny)
    model = loaded(case, config, device)
    held = sum(parameter.nbytes for parameter in model.parameters())
    steps, times = steps_of(case, tiny), list[float]()

    def read() -> None:
        """When the device has finished."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    start_peak(device)
    with tempfile.TemporaryDirectory() as directory:
        trainer = InOrder(
            model=model,
            args=arguments(case, directory, len(steps), device),
            data_collator=padded,
            train_dataset=[row(sample) for step in steps for sample in step],  # pyright: ignore[reportArgumentType]
            callbacks=[Watch(read, read)],
        )
        trainer.train()
    most = peak_bytes(device)
    sizes, best = (
        family_of(config, "benchmarks.gpu").read(config),
        peak(device, "bfloat16", peak_seconds(tiny)),
    )

    def flops(step: Sequence[Tokens]) -> float:
        targets = sum(int(sample.targets[1:].sum()) for sample in step)
        return step_flops(sizes, Trained(case.method), [len(sample.tokens) for sample in step], targets)

    seconds = [b - a for a, b in pairwise(times)]
    figures = figures_of(steps, seconds, flops, warmup(tiny))
    batches = [step[at : at + case.batch] for step in steps for at in range(0, len(step), case.batch)]
    computed = sum(len(batch) * max(len(sample.tokens) for sample in batch) for batch in batches)
    figures |= {
        "about": case.about,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "weights_bytes": held,
        "peak_bytes": most,
        "peak_above_weights": None if most is None else most - held,
        "useful": sum(len(sample.tokens) for batch in batches for sample in batch) / computed,
        "utilisation": figures["flops_per_second"] / best.measured,
    }
    yield Finding(f"{case.name} stock", None, figures)


def loaded(case: Case, config: dict[str, Any], device: torch.device) -> Any:
    """Random weights, as `from_pretrained(dtype=bfloat16)` would leave them."""
    defaults = ("model_type", "rope_theta", "partial_rotary_factor")  # of its class
    settings = Glm4Config(
        **{key: value for key, value in config.items() if key not in defaults}, use_cache=False
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = Glm4ForCausalLM(settings)
    torch.set_default_dtype(torch.float32)
    if case.base == "nf4":
        four_bits(model, device)
        model = prepare_model_for_kbit_training(model)
    return model if case.method == "full" else with_lora(model)


def four_bits(model: Any, device: torch.device) -> None:
    """What transformers makes of a model while it is loaded in four bits: every linear layer but the head."""
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )

    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for name, layer in layers:
        if name == "lm_head":
            continue
        packed = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
        )
        packed.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4").to(device)
        packed.bias = layer.bias
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, packed)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.hf_quantizer, model.config.quantization_config = (
        AutoHfQuantizer.from_config(quantization),
        quantization,
    )


def arguments(case: Case, directory: str, steps: int, device: torch.device) -> TrainingArguments:
    return TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        learning_rate=5e-4 if case.method == "lora" else 5e-5,
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.samples // case.batch,
        remove_unused_columns=False,
        dataloader_num_workers=0,  # samples are in memory
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
    )


def padded(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """On the left, to the longest."""
    width = max(len(each["input_ids"]) for each in rows)

    def filled(key: str, filler: int) -> Tensor:
        return torch.tensor([[filler] * (width - len(each[key])) + each[key] for each in rows])

    ids = filled("input_ids", 0)
    lengths = torch.tensor([len(each["input_ids"]) for each in rows])
    mask = torch.arange(width) >= (width - lengths)[:, None]
    return {"input_ids": ids, "labels": filled("labels", IGNORED), "attention_mask": mask.long()}
