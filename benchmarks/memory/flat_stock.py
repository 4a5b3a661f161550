"""The stock way (benchmarks/race/stock.py), for the picture of memory over many steps.

python -m benchmarks.memory.flat_stock JOB RESULT
"""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, TrainerCallback

from benchmarks.memory.live import Course, live_now
from benchmarks.race.job import read_job
from benchmarks.race.samples import read_samples
from benchmarks.race.stock import arguments, load, rows


class Scale(TrainerCallback):
    """Weighs the process when training starts and after each step."""

    def __init__(self) -> None:
        self.course = Course()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.course.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.course.step()


def main(job_file: Path, result_file: Path) -> None:
    job = read_job(job_file)
    torch.set_num_threads(job.threads)
    transformers.set_seed(job.seed)
    samples = rows(read_samples(Path(job.train)))
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = load(job)
    gc.collect()
    loaded, scale = live_now(), Scale()
    Seq2SeqTrainer(
        model=model,
        args=arguments(job),
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, padding="longest", return_tensors="pt"),
        train_dataset=samples,  # pyright: ignore[reportArgumentType]  (any sequence will do)
        callbacks=[scale],
    ).train()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    said = {"loaded": loaded, "said": [], "versions": versions}
    result_file.write_text(json.dumps(asdict(scale.course) | said) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
