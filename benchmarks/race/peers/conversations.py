"""The conversations of a race as text, in the order in which ours will train them: what the peers read.

python -m benchmarks.race.peers.conversations JOB OUT
"""

import sys
from pathlib import Path

from benchmarks.child import read
from benchmarks.race.draw import in_order
from benchmarks.race.job import Job
from benchmarks.race.ours import config_of
from glm_accelerate.data.inputs import open_inputs


def main(job_file: Path, out: Path) -> None:
    job = read(job_file, Job)
    config = config_of(job)
    inputs = open_inputs(config.data, Path(job.model))
    lines = Path(job.data).read_text(encoding="utf-8").splitlines()
    places = [inputs.train[number].place for number in in_order(job, config, inputs)]
    out.write_text("".join(lines[place.line - 1] + "\n" for place in places), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
