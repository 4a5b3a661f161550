"""The race of whole sets at tiny size: both sides are asked the same, and score each other's texts alike."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.bench
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no installed package

from benchmarks.child import read, write  # noqa: E402
from benchmarks.evaluation import our_evaluation, stock_evaluation, whole_set  # noqa: E402
from benchmarks.evaluation.job import Job, Result, result_of  # noqa: E402
from benchmarks.race import prepare_model  # noqa: E402
from benchmarks.report import origin  # noqa: E402
from glm_accelerate.evaluate.measuring import answers  # noqa: E402

ASKED = 5


@pytest.fixture
def job(tmp_path: Path) -> Job:
    lines: list[str] = []
    for number in range(8):
        said = [{"role": "user", "content": f"count {number} times 数到{number}"}]
        said += [{"role": "assistant", "content": " ".join(["word 词"] * (number % 4 + 1))}]
        lines.append(json.dumps({"messages": said}))
    (tmp_path / "dev.jsonl").write_text("\n".join(lines) + "\n")
    prepare_model.prepare_model(tmp_path / "dev.jsonl", tmp_path / "model", 300, shape=prepare_model.TINY)
    asked = whole_set.write_set(tmp_path / "dev.jsonl", tmp_path / "model", tmp_path / "set.jsonl", ASKED)
    assert asked == ASKED
    return Job(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "set.jsonl"),
        cache=str(tmp_path / "cache"),
        batch=2,
        max_new_tokens=8,
        threads=torch.get_num_threads(),
        dtype="float32",
        device="cpu",
    )


@pytest.mark.filterwarnings("ignore")  # what transformers says about itself is not ours to mend
def test_both_sides_are_asked_the_same_and_score_alike(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "generate", answers.generate)  # around which ours puts a clock

    def side(module: object, job: Job) -> Result:
        write(tmp_path / "job.json", job)
        module.main(tmp_path / "job.json", tmp_path / "result.json")  # pyright: ignore
        return read(tmp_path / "result.json", result_of)

    shipped = side(stock_evaluation, replace(job, prompts="shipped"))
    stock, ours = side(stock_evaluation, job), side(our_evaluation, job)
    assert shipped.shown == len(shipped.answers) > 0  # its prompts hold the answer
    assert stock.shown == ours.shown == 0
    _, found = whole_set.checks(stock, ours, shipped)
    assert found["stock texts by ours"] < 1e-6
    assert found["our texts by stock's packages"] < 1e-6
    assert found["same"] == found["asked"] == ASKED  # in float32 the answers are the same tokens
    page = whole_set.markdown(origin([], {}), job, ASKED, [whole_set.Round({2: stock}, ours)], shipped)
    assert "seconds that training would wait" in page
