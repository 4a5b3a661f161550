"""The stock way (benchmarks/race/stock.py), for the picture of memory over many steps.

python -m benchmarks.memory.flat_stock JOB RESULT
"""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.child import read
from benchmarks.memory.live import Course, live_now
from benchmarks.race.job import Job
from benchmarks.race.samples import read_samples
from benchmarks.race.stock import Watch, fine_tune, load, versions


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    transformers.set_seed(job.seed)
    samples = read_samples(Path(job.train))
    tokenizer, model = load(job)
    gc.collect()
    loaded, course = live_now(), Course()
    fine_tune(job, tokenizer, model, samples, Watch(course.begin, course.step))
    others = {"loaded": loaded, "said": [], "versions": versions()}
    result_file.write_text(json.dumps(asdict(course) | others) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
