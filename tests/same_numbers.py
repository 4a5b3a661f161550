"""Whether two versions of the source train the same numbers, to the last bit, and go on from each other.

python tests/same_numbers.py COMMIT [NAME ...]      COMMIT's source beside this tree's; prints what differs

Compared are losses, gradient norms and held-out losses of every step, and the files of weights and moments;
of exports every file. A run of COMMIT is also gone on with by this tree.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.demo.tiny import Size, write_tiny

ROOT = Path(__file__).parents[1]
STEPS, AGAIN = 20, 10  # all steps, and the one that a run goes on from
FIGURES = ("step", "loss", "grad_norm", "targets", "applied")


@dataclass(frozen=True)
class Case:
    """A run, as it is typed after the config."""

    overrides: str = ""
    ranks: int = 1
    evaluates: bool = False
    resumes: bool = False
    exports: str | None = None  # what is typed behind `export RUN OUT`


def cases() -> dict[str, Case]:
    """Every method on one to three ranks; evaluation in both places; going on; exports."""
    methods = {
        "LoRA": "adapt.method=lora",
        "full": "adapt.method=full",
        "freeze": "adapt.method=freeze",
        "prefix": "adapt.method=prefix adapt.prefix_tokens=8",
        "QLoRA": "adapt.method=lora adapt.base=nf4",
    }
    found = {
        f"{name}, {ranks} rank{'s' if ranks > 1 else ''}": Case(typed, ranks, resumes=ranks < 3)
        for name, typed in methods.items()
        for ranks in (1, 2, 3)
    }
    for form in ("compile=on", "compute=float32", "compute=float16"):
        found[f"LoRA, {form}"] = Case(f"{methods['LoRA']} precision.{form}")
    found["LoRA, divided"] = Case(f"{methods['LoRA']} parallel.shard=full", 2, resumes=True)
    found["full, recomputed"] = Case(f"{methods['full']} memory.recompute=blocks")
    found["full, fused update"] = Case(
        f"{methods['full']} memory.fuse_update=on optim.clip=0 train.micro_tokens=8192", resumes=True
    )
    found["full, 8-bit AdamW"] = Case(f"{methods['full']} optim.name=adamw8bit", resumes=True)
    found["LoRA, inline evaluation"] = Case("evaluate.every=5 evaluate.where=inline", evaluates=True)
    found["full, inline evaluation, 2 ranks"] = Case(
        f"{methods['full']} evaluate.every=5 evaluate.where=inline", 2, evaluates=True
    )
    found["LoRA, evaluation beside"] = Case("evaluate.every=10 evaluate.where=beside", evaluates=True)
    found["LoRA, adapter"] = Case(exports="")
    found["LoRA, merged"] = Case(exports="--merge")
    found["full, exported"] = Case(methods["full"], exports="")
    return found


def call(tree: Path, *words: str) -> str:
    """The command of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    start = "import sys; from glm_accelerate.cli.main import main; sys.exit(main())"
    line = [sys.executable, "-c", start, *words]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}{done.stdout[-2000:]}"
    return done.stdout


def figures(run: Path) -> dict[str, Any]:
    """What a run has come to, but for times and names."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    steps = {event["step"]: [event[name] for name in FIGURES] for event in events if event["kind"] == "step"}
    held = {event["step"]: event.get("loss") for event in events if event["kind"] == "eval"}
    return {"steps": steps, "held out": held, **files(run / "checkpoints" / f"checkpoint-{STEPS}")}


def files(folder: Path) -> dict[str, Any]:
    """Digests of tensors' files."""
    found = sorted(folder.rglob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def train(tree: Path, case: Case, config: Path, run: Path, *more: str) -> dict[str, Any]:
    """Trains, and what came of it."""
    words = [str(config), *case.overrides.split(), f"train.steps={STEPS}", f"checkpoint.every={AGAIN}"]
    if case.evaluates:
        words.append(f"data.dev={config.parent / 'dev.jsonl'}")
    ranks = ["--nproc", str(case.ranks)] if case.ranks > 1 else []
    call(tree, "train", *words, *ranks, "--run", str(run), *more)
    return figures(run)


def compared(case: Case, trees: Sequence[Path], config: Path, work: Path) -> list[str]:
    """What differs."""
    runs = [work / name for name in ("old", "new")]
    old, new = (train(tree, case, config, run) for tree, run in zip(trees, runs, strict=True))
    odd = differences("", old, new)
    if case.resumes:
        again = work / "again"
        shutil.copytree(runs[0], again, symlinks=True)
        again.joinpath("events.jsonl").write_text("")
        gone_on = train(trees[1], case, config, again, "--resume", str(AGAIN))
        late = {step: said for step, said in old["steps"].items() if step > AGAIN}
        odd += differences("gone on with: ", {**old, "steps": late}, gone_on)
    if case.exports is not None:
        outs = [work / f"{name}-out" for name in ("old", "new")]
        for tree, run, out in zip(trees, runs, outs, strict=True):
            call(tree, "export", str(run), str(out), *case.exports.split())
        odd += differences("export: ", *map(files, outs))
    return odd


def differences(what: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of what is not equal, or not there at all."""
    assert old, "nothing was compared"
    return [f"{what}{name}" for name in {**old, **new} if old.get(name) != new.get(name)]


def prepare(work: Path) -> Path:
    """A tiny model and conversations of very different lengths. Returns the config."""
    drawn, words = random.Random(0), [f"w{number}" for number in range(200)]
    model = write_tiny(work / "model", words, size=Size(hidden=64, layers=3, ffn=96))
    for name, count in (("train", 120), ("dev", 12)):
        with (work / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                texts = [" ".join(drawn.choices(words, k=drawn.randint(1, 60))) for _ in range(4)]
                roles = ("user", "assistant", "user", "assistant")
                turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
                file.write(json.dumps({"messages": turns}) + "\n")
    config = work / "run.yaml"
    said = {
        "model": {"path": str(model)},
        "data": {"train": str(work / "train.jsonl"), "cache": str(work / "cache")},
        "train": {"step_samples": 6, "micro_tokens": 256},
        "evaluate": {"metrics": ["loss"]},
    }
    config.write_text(json.dumps(said))
    return config


def main(commit: str, only: Sequence[str]) -> int:
    """0 if nothing differs."""
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
        work, odd = Path(folder), 0
        before = work / "before"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(before), commit], cwd=ROOT, check=True
        )
        try:
            config = prepare(work)
            for name, case in cases().items():
                if only and name not in only:
                    continue
                place = work / "case"
                place.mkdir()
                found = compared(case, (before, ROOT), config, place)
                shutil.rmtree(place)
                odd += bool(found)
                print(f"{name}: {', '.join(found) or 'the same'}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    print(f"{odd} differ")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
