"""Scoring in a process: the scores of the functions, and nothing that a metric does reaches us."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_accelerate.evaluate.measuring import grade
from glm_accelerate.evaluate.measuring.grade import Grader
from glm_accelerate.evaluate.measuring.metrics import metric_names, needs_answers
from glm_accelerate.evaluate.measuring.text import text_scores, word_cutter
from glm_accelerate.runtime.errors import UserError

OWN = """
import os, re, sys, time
from neighbour import FACTOR

def length(reference, answer):
    return FACTOR * (len(answer) - len(reference))

def modules(reference, answer, *, name="torch"):
    return float(name in sys.modules)

def process(reference, answer):
    return float(os.getpid())

def prints(reference, answer):
    print("chatter of a metric")
    return 1

def raises(reference, answer):
    return 1 / (int(answer[-1]) - 1)

def infinite(reference, answer):
    return float("inf") if answer == "answer 4" else 1.0

def words(reference, answer):
    return answer

def quits(reference, answer):
    os._exit(3) if answer == "answer 5" else None
    return 1.0

def hangs(reference, answer):
    while answer == "answer 5":
        pass
    return 1.0

def backtracks(reference, answer):
    if answer == "answer 5":
        re.match("(a+)+$", "a" * 60 + "b")  # for ages, and no other thread runs meanwhile
    return 1.0

def sleeps(reference, answer):
    time.sleep(0.02)
    return 1.0

alias = length
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("FACTOR = 2\n")
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def graded(metrics, pairs):
    with Grader(metrics) as grader:
        for number, (reference, answer) in enumerate(pairs):
            grader.put(number, reference, answer)
        return grader.scores(), grader.failures()


PAIRS = [(f"answer {number - number % 2}", f"answer {number}") for number in range(9)]


def test_scores_are_those_of_the_functions(own):
    pairs = [("今天天气很好。", "今天天气不好。"), ("the cat sat", "the cat sat "), ("a\nb", ""), *PAIRS]
    scores, failures = graded(["loss", "rouge", "exact_match", "bleu", f"{own}:length"], pairs)
    cut = word_cutter()
    names = ("bleu", "rouge_1", "rouge_2", "rouge_l")
    assert failures == []
    assert list(scores) == list(range(len(pairs)))
    for number, (reference, answer) in enumerate(pairs):
        assert list(scores[number]) == [
            "rouge_1",
            "rouge_2",
            "rouge_l",
            "exact_match",
            "bleu",
            f"{own}:length",
        ]
        exact = float(reference.strip() == answer.strip())
        expected = {"exact_match": exact, f"{own}:length": 2.0 * (len(answer) - len(reference))}
        assert scores[number] == {**text_scores(names, reference, answer, cut), **expected}


def test_a_worker_is_a_process_without_torch_and_its_chatter_is_not_ours(own, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    scores, _ = graded([f"{own}:modules", f"{own}:process", f"{own}:prints", f"{own}:alias"], PAIRS)
    said = list(scores[0].values())
    assert said[0] == 0.0
    assert said[1] != os.getpid()
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.count("chatter of a metric") == len(PAIRS)


def test_what_is_wrong_with_a_metric_fails_that_metric(own):
    names = [f"{own}:{name}" for name in ("raises", "infinite", "words", "length")]
    scores, failures = graded([*names, "exact_match"], PAIRS)
    assert [list(score) for score in scores.values()] == [[names[3], "exact_match"]] * len(PAIRS)
    assert failures == [
        f"{names[1]}, sample 4: ValueError: it returned inf (metrics.py:{_line('it returned')})",
        f"{names[0]}, sample 1: ZeroDivisionError: division by zero (own.py:{1 + _own_line('1 / (')})",
        f"{names[2]}, sample 0: ValueError: could not convert string to float: 'answer 0' "
        f"(metrics.py:{_line('float(metric(')})",
    ]


def _line(words: str) -> int:
    source = Path(grade.__file__).with_name("metrics.py").read_text().splitlines()
    return 1 + next(at for at, line in enumerate(source) if words in line)


def _own_line(words: str) -> int:
    return next(at for at, line in enumerate(OWN.splitlines()) if words in line)


def test_a_metric_that_ends_its_process_is_to_blame(own):
    scores, failures = graded([f"{own}:quits", "exact_match"], PAIRS)
    assert failures == [f"{own}:quits, sample 5: the process that scored it ended (exit code 3)"]
    assert [score["exact_match"] for score in scores.values()] == [float(n % 2 == 0) for n in range(9)]


def test_a_metric_that_hangs_is_to_blame(own, monkeypatch):
    monkeypatch.setattr(grade, "PATIENCE", 2.0)
    scores, failures = graded([f"{own}:hangs", "exact_match"], PAIRS)
    assert failures == [f"{own}:hangs, sample 5: the process that scored it said nothing for 2 s"]
    assert [score["exact_match"] for score in scores.values()] == [float(n % 2 == 0) for n in range(9)]


def test_a_file_that_cannot_be_loaded_is_told_and_no_more(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def score(reference, answer): return 1\nraise RuntimeError('as it is loaded')\n")
    scores, failures = graded([f"{path}:score", "exact_match"], PAIRS)
    assert failures == [f"{path}:score: RuntimeError: as it is loaded (broken.py:2)"]
    assert scores[2] == {"exact_match": 1.0}


def test_with_no_metric_left_nothing_is_waited_for(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import os\ndef score(reference, answer): return 1\nos._exit(1)\n")
    scores, failures = graded([f"{path}:score"], PAIRS)
    assert scores == {number: {} for number in range(len(PAIRS))}
    assert failures == [f"{path}:score, sample 0: the process that scored it ended (exit code 1)"]


def test_where_no_process_can_be_started_metrics_fail_and_no_more():
    """As on a machine with too many of them: here files are what there are too many of."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        scores, failures = graded(["exact_match"], PAIRS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert scores == {number: {} for number in range(len(PAIRS))}
    assert failures == ["exact_match: no process can be started to score it: Too many open files"]


def test_a_killed_worker_is_replaced(own):
    with Grader([f"{own}:process", f"{own}:sleeps"]) as grader:
        for number in range(40):
            grader.put(number, "a", "b")
            if number == 20:
                os.kill(grader._worker._process.pid, signal.SIGKILL)
        scores, failures = grader.scores(), grader.failures()
    assert failures == []
    assert sorted(scores) == list(range(40))
    assert 1 <= len({score[f"{own}:process"] for score in scores.values()}) <= 2


def test_putting_does_not_wait_for_scoring(own, monkeypatch):
    """All is put before a slow metric has scored a tenth; beyond the backlog `put` waits; nothing is lost."""
    with Grader([f"{own}:sleeps"]) as grader:
        for number in range(100):
            grader.put(number, "a", "b")
        assert len(grader._scores) < 10
        assert len(grader.scores()) == 100
    monkeypatch.setattr(grade, "BACKLOG", 5)
    with Grader([f"{own}:sleeps"]) as grader:
        for number in range(60):
            grader.put(number, "a", "b")
            assert len(grader._waiting) <= 5
        assert len(grader._scores) > 60 - 5 - grade.AHEAD - 5
        assert len(grader.scores()) == 60


def test_texts_of_any_kind_arrive_as_they_were(own):
    odd = ["\ud800 alone", "\x00", "a" * 300_000, "\u2028\n\r\n", "😀"]
    scores, _ = graded(["exact_match", f"{own}:length"], [(text, text) for text in odd])
    assert [list(score.values()) for score in scores.values()] == [[1.0, 0.0]] * len(odd)


@pytest.mark.parametrize("hanging", ["hangs", "backtracks"])
def test_an_interrupt_of_the_group_does_not_end_workers_and_the_end_of_the_parent_does(own, hanging, spawn):
    """A program that lives through Ctrl-C keeps its scores, even if that comes before a worker has begun;
    killed, it leaves no worker, not even a hanging one.
    """
    program = f"""
import os, signal, sys
from glm_accelerate.evaluate.measuring.grade import Grader
signal.signal(signal.SIGINT, lambda *_: None)
with Grader(["{own}:process", "{own}:{hanging}"]) as grader:
    first = grader._worker
    assert os.getpgid(first._process.pid) == os.getpgid(0)  # whoever ends all of us ends it, too
    os.killpg(0, signal.SIGINT)
    grader.put(0, "a", "b")
    grader._work(30.0)
    os.killpg(0, signal.SIGINT)
    grader.put(1, "a", "b")
    (scorer,) = {{score["{own}:process"] for score in grader.scores().values()}}
    assert scorer == first._process.pid
    grader.put(2, "a", "answer 5")
    print(scorer, flush=True)
    sys.stdin.read()
"""
    process = spawn(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    worker = int(float(process.stdout.readline()))
    time.sleep(0.5)  # it is at the answer that hangs
    process.kill()
    process.communicate()
    ends = time.monotonic() + 60
    while _lives(worker) and time.monotonic() < ends:
        time.sleep(0.05)
    lives = _lives(worker)
    if lives:
        os.kill(worker, signal.SIGKILL)
    assert not lives


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_names_in_full():
    assert metric_names(["loss"]) == ()
    assert metric_names(["rouge", "loss", "rouge_l", "bleu", "exact_match"]) == (
        "rouge_1", "rouge_2", "rouge_l", "bleu", "exact_match",
    )  # fmt: skip
    assert not needs_answers(["loss"])
    assert needs_answers(["loss", "bleu"])
    assert graded(["loss"], []) == ({}, [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blue", "no metric 'blue' .bleu."),
        ("missing.py:score", r"missing.py: the metric's file cannot be read: No such file"),
        ("{own}:lengths", r"there is no function 'lengths' \(length\?\)"),
        ("{bad}:score", r"bad.py:1: the metric's file is not Python: '\(' was never closed$"),
        ("{shape}:one", r"shape.py:1: a metric is called with two texts \(def one\("),
        ("{shape}:three", r"shape.py:2: a metric is called with two texts"),
        ("{shape}:named", r"shape.py:4: a metric is called with two texts"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_runs(own, tmp_path, name, words):
    (tmp_path / "bad.py").write_text("def score(\n")
    shape = "def one(a): return 1\ndef three(a, b, c): return 1\ndef two(a, b, c=1, *d): return 1\n"
    (tmp_path / "shape.py").write_text(f"{shape}def named(a, b, *, c): return 1\ndef many(*a): return 1\n")
    places = {name: f"{tmp_path}/{name}.py" for name in ("own", "bad", "shape")}
    with pytest.raises(UserError, match=words):
        Grader([name.format(**places)])
    assert len(metric_names([f"{places['shape']}:two", f"{places['shape']}:many"])) == 2
