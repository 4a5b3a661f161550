"""The samples of a race, tokenized once by our own `prepare`, so that both sides learn the same labels.

python -m benchmarks.race.draw JOB DEV HELDOUT N   writes the samples of JOB in the order in which ours will
train them to its `train` file, and N held-out ones from DEV to HELDOUT.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.child import read
from benchmarks.race.job import Job
from benchmarks.race.ours import config_of
from benchmarks.race.samples import Tokens, write_samples
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.store import Store
from glm_accelerate.plan.resolve import order_of


def in_order(job: Job, config: RunConfig, inputs: Inputs) -> list[int]:
    """Sample numbers of all steps, one after the other."""
    numbers: list[int] = []
    for number, _, drawn in order_of(inputs, config, job.batch).steps_from(0):
        if number > job.steps or len(drawn) < job.batch:  # an epoch's last may be smaller: stock has none
            break
        numbers += drawn.tolist()
    if len(numbers) < job.steps * job.batch:
        raise SystemExit(f"{job.data} has {len(inputs.train)} samples, {job.steps * job.batch} are needed")
    return numbers


def even_choice(count: int, wanted: int, seed: int) -> Sequence[int]:
    """The same `wanted` of `count` numbers for every call with this seed, in order."""
    if wanted >= count:
        return range(count)
    chosen = np.random.Generator(np.random.PCG64([seed, 2 << 32])).permutation(count)[:wanted]
    return sorted(int(number) for number in chosen)


def tokens_of(store: Store, numbers: Sequence[int]) -> list[Tokens]:
    return [Tokens(store[number].tokens, store[number].targets) for number in numbers]


def main(job_file: Path, dev: Path, heldout: Path, count: int) -> None:
    job = read(job_file, Job)
    config = config_of(job, dev)
    inputs = open_inputs(config.data, Path(job.model))
    assert inputs.dev is not None
    write_samples(Path(job.train), tokens_of(inputs.train, in_order(job, config, inputs)))
    write_samples(heldout, tokens_of(inputs.dev, even_choice(len(inputs.dev), count, job.seed)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
