"""The page as a browser shows it, where one is installed: the same scripts live and in one file."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from glm_accelerate.cli.main import main
from glm_accelerate.watch.file import page_of
from glm_accelerate.watch.run import WatchedRun
from glm_accelerate.watch.server import asset

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
)


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    """Interrupted after 30 steps, gone on from 20 of them; a model that answers with a script."""
    folder = tmp_path / HOSTILE.replace("/", "")
    (folder / "evals").mkdir(parents=True)
    begun = {"family": "glm4", "method": "lora", "device": "cpu", "ranks": 1, "steps": 40}
    events = [{"kind": "start", "attempt": 1, "step": 0, **begun}]
    for attempt, numbers in ((1, range(1, 31)), (2, range(21, 41))):
        if attempt == 2:
            events.append({"kind": "resume", "attempt": 2, "step": 20, **begun})
        events += [{"kind": "step", "attempt": attempt, "step": n, "loss": n + attempt / 10} for n in numbers]
    scored = {
        "status": "done",
        "loss": 2.5,
        "ci95": [2.4, 2.6],
        "samples": 8,
        "answers": 1,
        "where": "inline",
    }
    events += [
        {"kind": "eval", "attempt": 2, "step": 40, **scored, "seconds": 0.5},
        {"kind": "warning", "attempt": 2, "said": HOSTILE},
        {"kind": "stop", "attempt": 2, "step": 40, "reason": "done"},
    ]
    lines = [json.dumps({"time": 1.7e9 + place, **event}) + "\n" for place, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(lines) + '{"kind": "st', encoding="utf-8")
    answer = {"prompt": HOSTILE, "reference": "二", "answer": HOSTILE, "scores": {}}
    (folder / "evals/40-a-1.predictions.jsonl").write_text(json.dumps(answer) + "\n")
    rank = {"rank": 0, "process": 7, "step": 40, "phase": HOSTILE, "silent": 9.0, "stopped": True}
    node = {
        "node": HOSTILE, "time": 1.7e9, "attempt": 2, "ended": False, "load": 1.5, "cores": 2,
        "memory": {"free": 1 << 30, "whole": 1 << 31}, "ranks": [rank],
        "others": [{"device": "cuda:0", "bytes": 3 << 30, "count": 2, "named": [HOSTILE]}],
    }  # fmt: skip
    (folder / "ranks").mkdir()
    (folder / "ranks/n.json").write_text(json.dumps(node))
    return WatchedRun(folder, folder.name)


def shown(page: str, tmp_path: Path, language: str = "en") -> str:
    """The document after its scripts have run."""
    assert BROWSER is not None
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    words = [*QUIET.split(), f"--user-data-dir={tmp_path}/browser", f"--accept-lang={language}", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *words, "--virtual-time-budget=3000", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_browser_draws_it_and_runs_no_text(run: WatchedRun, language: str, tmp_path: Path) -> None:
    dom = shown(page_of([run]), tmp_path, language)
    assert "<title>glm-accelerate</title>" in dom  # neither the name, nor a warning, nor an answer ran
    assert dom.count("<canvas") == 2  # loss, and what an evaluation took; of the rest nothing is known
    assert f'<html lang="{language[:2]}"' in dom
    assert {"en": "step 40 of 40 · finished", "zh-CN": "第 40 步 / 40 · 已完成"}[language] in dom
    assert {"en": "Loss 40.2 (step 40)", "zh-CN": "损失 40.2 (第 40 步)"}[language] in dom
    assert "&lt;img src=x onerror" in dom
    assert {"en": "stopped by a signal (SIGSTOP); no sign for", "zh-CN": "被信号暂停（SIGSTOP），无信号已"}[
        language
    ] in dom


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_its_policy_stops_a_script_that_got_in(run: WatchedRun, tmp_path: Path) -> None:
    alien = "<script>document.title = 'taken'</script>"
    page = page_of([run]).replace("</main>", f"</main>{alien}")
    assert "<title>glm-accelerate</title>" in shown(page, tmp_path)
    open_to_all = re.sub(r"<meta http-equiv[^>]*>", "", page)
    assert "<title>taken</title>" in shown(open_to_all, tmp_path)  # what the policy is for


def test_one_file_has_all_in_it_and_asks_for_nothing(run: WatchedRun) -> None:
    page = page_of([run, run])
    assert not re.search(r"<(?:script|link)[^>]*(?:src|href)=", page)
    assert page.count("</script>") == 3  # the data, the library, the page: no text ended one
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    known = json.loads(data)
    assert [len(each["events"]) for each in known] == [55, 55]
    assert known[0]["answers"]["40"][0]["answer"] == HOSTILE
    (node,) = known[0]["nodes"]
    assert (node["node"], node["ranks"][0]["state"]) == (HOSTILE, "stopped")
    assert asset("page.js") in page


def test_it_is_written_by_the_command(
    run: WatchedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(run.directory), "--html", str(tmp_path / "run.html")]) == 0
    pages = ((tmp_path / "run.html").read_text(encoding="utf-8"), page_of([run]))
    one, other = (re.sub(r'"(age|seconds)": [\d.]+', "", page) for page in pages)
    assert one == other
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_both_languages_have_the_same_words() -> None:
    words = re.search(r"const WORDS = \{(.*?)\n\};", asset("page.js"), re.DOTALL)
    assert words is not None
    english, chinese = (set(re.findall(r"(\w+): \"", part)) for part in words[1].split("\n  zh: {"))
    assert english - {"en"} == chinese
    used = set(re.findall(r"\bt\(\"(\w+)\"\)", asset("page.js")))
    assert used <= chinese
