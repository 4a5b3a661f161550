"""The page as one file: the same scripts and styles inside it, and the runs as they are now."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence

from glm_accelerate.watch.run import WatchedRun
from glm_accelerate.watch.server import asset


def page_of(runs: Sequence[WatchedRun]) -> str:
    """It asks nobody for anything, and its policy lets no other script run."""
    known = [
        {
            **run.about(),
            "events": run.events(0)["events"],
            "nodes": run.nodes(),
            "answers": _answers(run),
        }
        for run in runs
    ]
    data = json.dumps(known, ensure_ascii=False).replace("<", "\\u003c")  # no text ends the element
    scripts, styles = [asset("uplot.js"), asset("page.js")], [asset("uplot.css"), asset("page.css")]
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; base-uri 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += "".join(f"<style>{style}</style>" for style in styles)
    body = f'<script type="application/json" id="data">{data}</script>'
    body += "".join(f"<script>{script}</script>" for script in scripts)
    page = re.sub(r" *<(?:link|script) [^\n]*\n", "", asset("index.html"))
    return page.replace("</head>", f"{head}\n</head>").replace("</body>", f"{body}\n</body>")


def _answers(run: WatchedRun) -> dict[int, list[dict[str, object]]]:
    steps = {
        event["step"]
        for event in run.events(0)["events"]
        if event.get("kind") == "eval" and event.get("answers")
    }
    return {step: run.answers(step) for step in sorted(steps)[-3:]}


def _digests(texts: Sequence[str]) -> str:
    sums = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in sums)
