"""How soon the page of `watch` shows a long run: from the address to the first drawing, in a real browser.

python -m benchmarks.watch.draw [--events N] [--axe axe.min.js] [--screens DIR] [--out DIR]

Needs `pip install playwright` and Chromium. --axe: axe-core's file, whose findings on the page are counted,
in both languages, light and dark, at a desk's width and a phone's.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.report import origin, page, publish, table
from glm_accelerate.watch.run import WatchedRun
from glm_accelerate.watch.server import PageServer

ABOUT = """\
**drawn**: from the navigation to the first drawing with figures, as the page's own clock has it, so reading,
thinning and sending the log are in it; the median of three browsers that know nothing yet. **axe-core**: the
rules of accessibility that the page breaks.
"""
TIMES = 3
WIDTHS = {"desk": 1400, "phone": 390}


def write_log(folder: Path, count: int) -> None:
    """Steps, each 1,000th with a checkpoint and each 5,000th with an evaluation."""
    step = {"attempt": 1, "applied": True, "samples": 4, "tokens": 1480, "targets": 400, "seconds": 0.0663}
    begun = {"family": "glm4", "method": "lora", "device": "cpu", "ranks": 1, "steps": count}
    with (folder / "events.jsonl").open("w") as file:

        def write(kind: str, number: int, **fields: Any) -> None:
            file.write(json.dumps({"time": 1.7e9 + number, "kind": kind, "step": number, **fields}) + "\n")

        write("start", 0, attempt=1, **begun)
        for number in range(1, count + 1):
            loss = 6 / (1 + number / 1e5) + number % 7 / 10
            more = {"learning_rate": 5e-4, "grad_norm": 0.4 + number % 5 / 10, "memory_bytes": 4 << 28}
            write("step", number, loss=loss, tokens_per_second=2233.1 + number % 90, **more, **step)
            if number % 1000 == 0:
                write("checkpoint", number, bytes=51_905, blocked_seconds=0.01, total_seconds=0.04)
            if number % 5000 == 0:
                ends = {"ci95": [loss - 0.1, loss + 0.1], "samples": 90, "where": "inline", "seconds": 0.2}
                write("eval", number, status="done", loss=loss, **ends)


def drawn(browser: Browser, address: str) -> float:
    """Milliseconds."""
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    found = float(tab.evaluate("document.documentElement.dataset.drawn"))
    context.close()
    return found


def findings(browser: Browser, address: str, axe: Path, screens: Path | None) -> dict[str, list[str]]:
    """By how the page is looked at, which of axe's rules it breaks."""
    found: dict[str, list[str]] = {}
    for (name, width), scheme, language in product(WIDTHS.items(), ("light", "dark"), ("en", "zh-CN")):
        context = browser.new_context(
            color_scheme=scheme,  # pyright: ignore[reportArgumentType]
            locale=language,
            viewport={"width": width, "height": 1200},
            bypass_csp=True,  # axe is a script of ours, which the page's policy would not let in
        )
        tab = context.new_page()
        tab.goto(address)
        tab.wait_for_selector("html[data-drawn]", timeout=60_000)
        tab.locator("figure summary").first.click()
        tab.add_script_tag(path=str(axe))
        told = tab.evaluate("axe.run()")
        found[f"{name}, {scheme}, {language}"] = [each["id"] for each in told["violations"]]
        if screens is not None:
            tab.screenshot(path=str(screens / f"{name}-{scheme}-{language}.png"), full_page=True)
        context.close()
    return found


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="From the address to the first drawing.")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--screens", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.watch.draw", *words], {})
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        write_log(folder, given.events)
        size = (folder / "events.jsonl").stat().st_size
        with PageServer([WatchedRun(folder, "run")]) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            times = [drawn(browser, server.address) for _ in range(TIMES)]
            broken = findings(browser, server.address, given.axe, given.screens) if given.axe else {}
            version = browser.version
            browser.close()
            server.shutdown()
    rows = [(f"{given.events:,}", f"{size / 1e6:,.0f}", f"{median(times) / 1000:.2f}")]
    body = table(("events", "MB", "drawn s"), rows)
    if broken:
        body += "\n\n" + table(
            ("looked at", "axe-core"), [(how, ", ".join(ids) or "none") for how, ids in broken.items()]
        )
    summary = f"Chromium {version}: {given.events:,} events are drawn in {median(times) / 1000:.2f} s"
    figures = {"milliseconds": times, "bytes": size, "axe": broken}
    publish(
        given.out,
        "watch-draw",
        source,
        page("The page of a long run", source, [summary], ABOUT, body),
        figures,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
