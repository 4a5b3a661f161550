"""The race at tiny size: both sides really train the same samples and are judged by the same judge."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.bench
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no installed package

from benchmarks.child import read, write  # noqa: E402
from benchmarks.race import draw, judge, ours, prepare_model, stock  # noqa: E402
from benchmarks.race.figures import Pair, Peak, Speed, rows  # noqa: E402
from benchmarks.race.job import Job, Method, Result  # noqa: E402
from benchmarks.race.report import Heat, as_json, markdown  # noqa: E402
from benchmarks.race.samples import read_samples  # noqa: E402
from benchmarks.report import origin  # noqa: E402

BATCH, STEPS = 2, 3


def conversations(path: Path, count: int, start: int) -> Path:
    """Turns whose lengths differ, so that stock has to pad."""
    lines: list[str] = []
    for number in range(start, start + count):
        question, answer = f"count {number} times", " ".join(["word"] * (number % 7 + 1))
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data and the held-out samples."""
    work = tmp_path_factory.mktemp("race")
    train = conversations(work / "train.jsonl", 12, 0)
    prepare_model.prepare_model(train, work / "model", vocab=300, shape=prepare_model.TINY)
    return work


def job_of(work: Path, method: Method) -> Job:
    return Job(
        model=str(work / "model"),
        data=str(work / "train.jsonl"),
        train=str(work / "train.npz"),
        cache=str(work / "cache"),
        export="",
        method=method,
        batch=BATCH,
        steps=STEPS,
        max_tokens=64,
        seed=0,
        threads=torch.get_num_threads(),
        compile=False,  # for so short a run it would take longer than all the rest
    )


@pytest.mark.filterwarnings("ignore")  # what transformers and peft say about themselves is not ours to mend
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.prove)])
def test_both_sides_train_the_same_samples_and_are_judged_alike(course: Path, method: Method) -> None:
    work = course
    job = job_of(work, method)
    job_file, heldout = work / "job.json", work / "heldout.npz"
    write(job_file, job)
    draw.main(job_file, conversations(work / "dev.jsonl", 5, 100), heldout, 4)
    assert len(read_samples(heldout)) == 4

    results: dict[str, Result] = {}
    losses: dict[str, float] = {}
    for name, side in (("stock", stock), ("ours", ours)):
        export = work / f"{method}-{name}"
        write(job_file, replace(job, export=str(export)))
        side.main(job_file, work / "result.json")
        results[name] = read(work / "result.json", Result)
        judge.main(work / "model", export, heldout, work / "loss.json")
        losses[name] = json.loads((work / "loss.json").read_text())["loss"]
    judge.main(work / "model", work / "model", heldout, work / "loss.json")
    before = json.loads((work / "loss.json").read_text())["loss"]

    pair = Pair(results["stock"], results["ours"], losses["stock"], losses["ours"])  # checks equal tokens
    assert pair.stock.tokens == [
        sum(len(sample.tokens) for sample in read_samples(Path(job.train))[at : at + BATCH])
        for at in range(0, STEPS * BATCH, BATCH)
    ]
    assert pair.stock.trainable == pair.ours.trainable
    for result in results.values():
        assert len(result.wall_seconds) == len(result.cpu_seconds) == STEPS
        # The model is tiny and the process this one: what the steps needed lies close to what was loaded,
        # and what tests before this one had freed may have gone back to the system meanwhile.
        assert result.memory_before > 0
        assert result.memory_peak == pytest.approx(result.memory_loaded, rel=0.5)
    # Equal work from equal weights: they end at nearly the same place, and not where they began.
    assert losses["ours"] == pytest.approx(losses["stock"], rel=0.01)
    assert losses["ours"] != before
    assert losses["stock"] != before


def result(seconds: list[float], tokens: list[int], peak: int) -> Result:
    return Result(
        side="stock",
        wall_seconds=seconds,
        cpu_seconds=[2 * second for second in seconds],
        tokens=tokens,
        targets=tokens,
        computed=[2 * count for count in tokens],
        memory_before=100_000_000,
        memory_loaded=110_000_000,
        memory_peak=peak,
        trainable=1,
        versions={"torch": "0"},
    )


def test_ratios_are_taken_within_a_repeat() -> None:
    # The machine was half as fast in the second repeat; ours was twice as fast in both.
    pairs = [
        Pair(result([9.0, s], [50, 100], 400_000_000), result([9.0, s / 2], [50, 100], 200_000_000), 4.0, 3.9)
        for s in (1.0, 2.0)
    ]
    wall, cpu, *_ = table = rows(pairs, warmup=1, weights=50_000_000)
    assert wall.ratios == (2.0, 2.0)
    assert (wall.stock, wall.ours) == (75.0, 150.0)  # medians of 100, 50 and 200, 100 tokens a second
    assert cpu.stock == 37.5
    above = next(row for row in table if "above" in row.name)
    assert (above.stock, above.ours) == (250.0, 50.0)
    assert table[-1].ratio == pytest.approx(3.9 / 4.0)
    assert Speed("wall_seconds", 0)(pairs[0].stock) == 15.0
    assert Peak(above=0)(pairs[0].ours) == 200.0


def test_a_pair_of_different_work_is_refused() -> None:
    with pytest.raises(AssertionError, match="same samples"):
        Pair(result([1.0], [100], 1), result([1.0], [101], 1), 1.0, 1.0)


def test_the_report_says_where_its_figures_come_from() -> None:
    pair = Pair(result([1.0, 1.0], [5, 5], 300_000_000), result([0.5, 0.5], [5, 5], 250_000_000), 4.0, 4.01)
    heat = Heat("lora", 4, 9.0, (pair,), tuple(rows([pair], 1, 0)))
    data = [str(Path("/somewhere/of/mine") / name) for name in ("a.jsonl", "b.jsonl")]
    source = origin(["python", "-m", "benchmarks.race.race", "--data", *data], {"torch": "0"})
    text = markdown(source, [heat], parameters=34_494_976, warmup=1, max_tokens=1024)
    command = "--data a.jsonl b.jsonl"
    for said in (source.machine, source.commit, command, "**Not equal**", "torch 0", "34.5 M"):
        assert said in text
    assert "| speed by wall clock, tokens/s | 5.000 | 10.0 | 2.000 | 2.000 to 2.000 |" in text
    assert json.loads(json.dumps(as_json(source, [heat])))["heats"][0]["pairs"][0]["ours_loss"] == 4.01


def test_the_runner_itself_never_imports_torch() -> None:
    check = (
        "import sys, benchmarks.race.race; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_even_choice_is_fixed_and_without_repeats() -> None:
    chosen = list(draw.even_choice(1000, 64, 0))
    assert chosen == list(draw.even_choice(1000, 64, 0)) == sorted(set(chosen))
    assert len(chosen) == 64
    assert chosen != list(draw.even_choice(1000, 64, 1))
    assert list(draw.even_choice(5, 64, 0)) == [0, 1, 2, 3, 4]
