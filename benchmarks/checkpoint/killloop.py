"""Random SIGKILLs over a real run (dropout, packing, several epochs): does it end as if nothing had happened?

python -m benchmarks.checkpoint.killloop [--kills 50] [--ranks 1 2 3] [--out RESULTS]
One rank: the process is killed, the same command started again. More: one of them is killed, the launcher
starts the job again. Every loss, the final weights and the moments have to be equal to the last bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from glm_accelerate.checkpoint.find import latest
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import load_config
from glm_accelerate.demo.show import write_all
from glm_accelerate.observe.events import read_events

STEPS, EVERY = 1500, 20
SETTINGS = [
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "adapt.method=lora",
    "adapt.dropout=0.1",
    "evaluate.every=200",
]


def command(config: Path, run: Path, ranks: int) -> list[str]:
    shown = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(config), *SETTINGS]
    return [*shown, "--run", str(run), "--nproc", str(ranks)]


def digest(run: Path) -> str:
    """Of every tensor of the last checkpoint, and of what each step reported."""
    found, _ = latest(run)
    assert found is not None
    reader, made = Reader(found), hashlib.sha256()
    for group in ("weights", "optimizer"):
        for name in sorted(reader.names(group)):
            made.update(name.encode() + reader.tensor(group, name).numpy().tobytes())
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "step":
            made.update(f"{event['step']} {event['loss']} {event['grad_norm']}".encode())
    return made.hexdigest()


def lost(run: Path) -> list[int]:
    """Steps that each resume had to do again."""
    found: list[int] = []
    newest = 0
    for line in (run / "events.jsonl").read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if event["kind"] == "step":
            newest = event["step"]
        elif event["kind"] == "resume":
            found.append(newest - event["step"])
    return found


def kill_until(kills: int, config: Path, run: Path, ranks: int, drawn: random.Random) -> tuple[int, int]:
    """Runs the command to its end through so many kills. Returns kills and starts."""
    done = starts = 0
    while True:
        starts += 1
        with subprocess.Popen(
            command(config, run, ranks), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as job:
            while done < kills and job.poll() is None:
                time.sleep(drawn.uniform(2.5, 10.0))
                victims = ranks_of(job.pid) if ranks > 1 else [job.pid]
                if victims and job.poll() is None:
                    os.kill(drawn.choice(victims), signal.SIGKILL)
                    done += 1
            job.wait()
        if job.returncode == 0:
            return done, starts


def ranks_of(launcher: int) -> list[int]:
    """The processes that train, not torch's resource tracker."""
    found: list[int] = []
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in children.read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            if b"spawn_main" in words:
                found.append(int(child))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [
        "| ranks | kills | starts | equal to the last bit | steps lost, most | interval |",
        "|" + " --- |" * 6,
    ]
    said: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_all(work / "demo", STEPS)
        config = work / "demo" / "config.yaml"
        load_config(config, SETTINGS)
        for ranks in args.ranks:
            whole, killed = work / f"whole-{ranks}", work / f"killed-{ranks}"
            subprocess.run(command(config, whole, ranks), check=True, stdout=subprocess.DEVNULL)
            kills, starts = kill_until(args.kills, config, killed, ranks, random.Random(ranks))
            equal, most = digest(whole) == digest(killed), max(lost(killed), default=0)
            rows.append(f"| {ranks} | {kills} | {starts} | {'yes' if equal else 'NO'} | {most} | {EVERY} |")
            said.append({"ranks": ranks, "kills": kills, "equal": equal, "most_lost": most, "every": EVERY})
            print(rows[-1], flush=True)
    print("\n".join(rows))
    if args.out:
        args.out.with_suffix(".md").write_text("\n".join(rows) + "\n", encoding="utf-8")
        args.out.with_suffix(".json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
