"""The stock way: our own re-statement of what GLM-4's fine-tune script does, on the HF Trainer and PEFT.

python -m benchmarks.race.stock JOB RESULT

As there: bf16 weights, labels at -100, padding on the left to the longest of the batch, the fp32 loss of
transformers over all positions, LoRA 8/32/0.1 on q, k, v, default AdamW, linear decay, clipping at 1.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from benchmarks.child import read, write
from benchmarks.race.job import Job, Meter, Result, memory_now, memory_peak
from benchmarks.race.samples import Tokens, read_samples


class Watch(TrainerCallback):
    """Calls back when training starts and after each step."""

    def __init__(self, begin: Callable[[], None], step: Callable[[], None]) -> None:
        self.begin, self.step = begin, step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step()


def load(job: Job) -> tuple[Any, Any]:
    """Tokenizer and model as the script loads them."""
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, use_cache=False, dtype=torch.bfloat16)
    return tokenizer, model if job.method == "full" else with_lora(model)


def with_lora(model: Any) -> Any:
    """PEFT keeps the adapter in fp32."""
    targets = ["q_proj", "k_proj", "v_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=targets)
    return get_peft_model(model, lora)


def arguments(job: Job) -> Seq2SeqTrainingArguments:
    """The shipped settings. What is not said there is the library's default (so is the optimizer)."""
    return Seq2SeqTrainingArguments(
        output_dir=str(Path(job.export) / "trainer"),
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        per_device_train_batch_size=job.batch,
        remove_unused_columns=False,
        logging_strategy="steps",
        logging_steps=10,
        # From here on: what the measurement needs, in stock's favour where it matters.
        dataloader_num_workers=0,  # shipped: 16; samples are in memory already, so workers only cost
        train_sampling_strategy="sequential",  # the file is in the order of training
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=job.seed,
    )


def row(sample: Tokens) -> dict[str, list[int]]:
    """As the tokenizing `map` leaves it."""
    return {"input_ids": sample.tokens.tolist(), "labels": sample.labels.tolist()}


def fine_tune(job: Job, tokenizer: Any, model: Any, samples: Sequence[Tokens], watch: Watch) -> None:
    Seq2SeqTrainer(
        model=model,
        args=arguments(job),
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, padding="longest", return_tensors="pt"),
        train_dataset=[row(sample) for sample in samples],  # pyright: ignore[reportArgumentType]  (any sequence will do)
        callbacks=[watch],
    ).train()


def versions() -> dict[str, str]:
    return {module.__name__: module.__version__ for module in (torch, transformers, peft)}


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    transformers.set_seed(job.seed)
    before = memory_now()
    samples = read_samples(Path(job.train))
    tokenizer, model = load(job)
    gc.collect()
    loaded, meter = memory_now(), Meter()
    fine_tune(job, tokenizer, model, samples, Watch(meter.read, meter.read))
    peak = memory_peak()

    batches = [samples[at : at + job.batch] for at in range(0, job.steps * job.batch, job.batch)]
    result = Result(
        side="stock",
        wall_seconds=meter.wall_seconds(),
        cpu_seconds=meter.cpu_seconds(),
        tokens=[sum(len(s.tokens) for s in batch) for batch in batches],
        targets=[sum(int(s.targets.sum()) for s in batch) for batch in batches],
        computed=[len(batch) * max(len(s.tokens) for s in batch) for batch in batches],
        memory_before=before,
        memory_loaded=loaded,
        memory_peak=peak,
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        versions=versions(),
    )
    model.save_pretrained(job.export)
    write(result_file, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
