"""Results on disk: one file an evaluation, published whole by rename, its predictions readable beside it.

evals/<step>-<plan>-<attempt>.json                what was found; strict JSON, never NaN
evals/<step>-<plan>-<attempt>.predictions.jsonl   one question a line: prompt, reference, answer, right
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm_accelerate.checkpoint.publish import write_text
from glm_accelerate.evaluate.score import Interval, Prediction
from glm_accelerate.runtime.errors import UserError

FOLDER = "evals"
NAME = re.compile(r"(\d+)-([0-9a-f]+)-(\d+)\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Result:
    """One evaluation of one step. `plan` names what was asked: results compare only under the same plan."""

    step: int
    plan: str
    attempt: int
    status: Literal["done", "failed"]
    loss: float | None
    ci95: Interval | None  # of the loss
    samples: int  # evaluated
    total: int  # held out in all
    metrics: Mapping[str, float]
    seconds: float
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # of the metrics
    reason: str | None = None  # why it failed

    def event(self) -> dict[str, object]:
        """The fields of an `eval` event."""
        names = ["step", "status", "loss", "ci95", "samples", "total", "metrics", "seconds", "reason"]
        said: dict[str, object] = asdict(self)
        return {name: said[name] for name in names if name != "reason" or self.reason is not None}


def plan_hash(said: Mapping[str, object]) -> str:
    """A short name for what an evaluation asks: the same words, the same name."""
    text = json.dumps(said, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def write_result(run_dir: Path, result: Result, predictions: Sequence[Prediction] = ()) -> Path:
    """Publish a result; its predictions are there before it. The same evaluation made again replaces it."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.step}-{result.plan}-{result.attempt}.json"
    if predictions:
        lines = (json.dumps(asdict(prediction), ensure_ascii=False) + "\n" for prediction in predictions)
        write_text(path.with_suffix(".predictions.jsonl"), "".join(lines))
    write_text(path, json.dumps(asdict(result), ensure_ascii=False, allow_nan=False, indent=1) + "\n")
    return path


def read_results(run_dir: Path) -> dict[int, Result]:
    """Every step's result, in order of steps; of several attempts the highest wins."""
    results: dict[int, Result] = {}
    folder = run_dir / FOLDER
    paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):  # one attempt's later plan wins
        result = _read(path)
        before = results.get(result.step)
        if before is None or before.attempt <= result.attempt:
            results[result.step] = result
    return dict(sorted(results.items()))


def _read(path: Path) -> Result:
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        said["ci95"] = said["ci95"] and tuple(said["ci95"])
        said["intervals"] = {name: tuple(interval) for name, interval in said["intervals"].items()}
        return Result(**said)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a result: {error}", where=path, cure="move it away") from error
