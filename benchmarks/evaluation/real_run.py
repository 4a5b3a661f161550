"""A small real run whose every evaluation has all held-out samples, for `statistics --items RUN` to replay.

python -m benchmarks.evaluation.real_run RUN --data CONVERSATIONS.jsonl [--heldout 1000] [--steps 240]
"""

import argparse
from pathlib import Path

from benchmarks.race.prepare_model import SMALL, TINY, WORDS, prepare_model
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.train.run import train

EVALUATIONS = 12
RATES = {"full": 1e-3, "lora": 5e-4}


def divided(data: Path, work: Path, heldout: int) -> tuple[Path, Path]:
    """The last conversations are held out."""
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) > 2 * heldout, f"{len(lines)} conversations: too few to hold {heldout} out"
    work.mkdir(parents=True, exist_ok=True)
    files = work / "train.jsonl", work / "dev.jsonl"
    for file, part in zip(files, (lines[:-heldout], lines[-heldout:]), strict=True):
        file.write_text("".join(part), encoding="utf-8")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--heldout", type=int, default=1000)
    parser.add_argument("--method", default="full", choices=RATES)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--tiny", action="store_true", help="to try it out")
    given = parser.parse_args()
    work = given.run.with_name(f"{given.run.name}-files")
    train_file, dev_file = divided(given.data, work, given.heldout)
    if not (work / "model").is_dir():
        prepare_model(given.data, work / "model", WORDS, shape=TINY if given.tiny else SMALL)
    data = {"train": str(train_file), "dev": str(dev_file), "max_tokens": 1024, "cache": str(work / "cache")}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(work / "model")},
            "adapt": {"method": given.method},
            "data": data,
            "train": {"steps": given.steps, "step_samples": 4},
            "optim": {"learning_rate": RATES[given.method]},
            "evaluate": {"every": max(1, given.steps // EVALUATIONS), "samples": "all", "where": "inline"},
            "checkpoint": {"every": given.steps},
        }
    )
    for step, loss in train(config, given.run).losses.items():
        print(f"step {step}: held-out loss {loss:.4f}")


if __name__ == "__main__":
    main()
