"""Preparing data: ours against the stock way, on the same file and tokenizer, each in a process of its own.

python -m benchmarks.race.prepare --data TRAIN.jsonl [--megabytes 1000] [--repeats 3] [--out DIR]

The file is made from the lines of TRAIN.jsonl: numbered, their paragraphs exchanged, until it is large.
Stock is our own re-statement: `datasets` reads the JSON, and `map` with one process applies the chat template
to each message by itself, joins the numbers and labels, and writes Arrow.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Origin, number, origin, page, publish, table

MAX_INPUT = MAX_OUTPUT = 512  # as shipped; ours: their sum
SAMPLE_SECONDS = 0.05

ABOUT = """\
`stock-N` is `datasets.map` with N processes (the shipped script: 1), `ours-N` is N workers (1: no process
but its own, and the tokenizer's threads). Runs are interleaved, each in a fresh process with an empty cache;
start-up and imports count. Memory is the peak over the process and its children, shared pages once, without
mapped files (in brackets: with them). Ratios are taken between neighbours in time.

Not equal: stock cuts a long conversation at the right, ours shortens its prompt; ours also reads the file
once more for its digest, and syncs what it writes.
"""


@dataclass(frozen=True)
class Run:
    """One preparation. Memory is the peak of the sum over the process and its children, in bytes."""

    side: str
    seconds: float
    cpu_seconds: float
    anonymous: int  # what cannot be given back: not counting mapped files
    resident: int  # mapped files included
    samples: int
    tokens: int
    targets: int
    disk: int


# --- The two sides. Each is started as `... side NAME FILE MODEL CACHE RESULT`. ---


def ours(file: Path, model: Path, cache: Path, workers: int) -> tuple[int, int, int]:
    from glm_accelerate.config.sources import Source
    from glm_accelerate.data.prepare import prepare
    from glm_accelerate.data.workers import EncodeSettings

    settings = EncodeSettings(template="glm4-0414", max_tokens=MAX_INPUT + MAX_OUTPUT)
    store = prepare([Source(path=str(file), weight=1.0)], settings, model, cache=cache, workers=workers)
    return store.report.samples, store.report.tokens, store.report.targets


def stock(file: Path, model: Path, cache: Path, processes: int) -> tuple[int, int, int]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    dataset: Any = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    encoded = dataset.map(
        stock_batch,
        fn_kwargs={"tokenizer": tokenizer},
        batched=True,
        num_proc=processes,
        remove_columns=dataset.column_names,
    )
    arrow: Any = import_module("pyarrow.compute")
    column, labels = (encoded.data.column(name) for name in ("input_ids", "labels"))
    tokens = arrow.sum(arrow.list_value_length(column)).as_py()
    learnt = (arrow.sum(arrow.not_equal(chunk.flatten(), -100)).as_py() for chunk in labels.chunks)
    return len(encoded), tokens, sum(count or 0 for count in learnt)


def stock_batch(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Whole messages tokenized one at a time; what an assistant says is learnt, shifted by its role token."""
    prefix = [tokenizer.convert_tokens_to_ids(name) for name in ("[gMASK]", "<sop>")]
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for conversation in batch["messages"]:
        tokens, learnt = list(prefix), [False, False]
        for message in conversation:
            turn = {key: value for key, value in message.items() if value is not None}
            new = tokenizer.apply_chat_template([turn], tokenize=True, return_dict=False)[len(prefix) :]
            tokens += new
            learnt += [message["role"] == "assistant"] * len(new)
        tokens.append(stop)
        learnt = [False, *learnt]
        labels = [token if wanted else -100 for token, wanted in zip(tokens, learnt, strict=True)]
        longest = MAX_INPUT + MAX_OUTPUT + 1
        rows["input_ids"].append(tokens[:longest])
        rows["labels"].append(labels[:longest])
    return rows


def side(name: str, file: Path, model: Path, cache: Path, result: Path) -> None:
    kind, _, processes = name.partition("-")
    samples, tokens, targets = (ours if kind == "ours" else stock)(file, model, cache, int(processes))
    result.write_text(json.dumps({"samples": samples, "tokens": tokens, "targets": targets}))


# --- Measuring them. ---


def measure(name: str, file: Path, model: Path, scratch: Path) -> Run:
    """A fresh cache, a fresh process; start-up, imports and the first reading of the file included."""
    cache, result = scratch / "cache", scratch / "result.json"
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.race.prepare", "side", name, file, model, cache, result]
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command])
    anonymous = resident = 0
    while process.poll() is None:
        now = [memory(pid) for pid in tree(process.pid)]
        anonymous = max(anonymous, sum(each[0] for each in now))
        resident = max(resident, sum(each[1] for each in now))
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{name} ended with code {process.returncode}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    disk = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return Run(name, seconds, cpu, anonymous, resident, **json.loads(result.read_text()), disk=disk)


def tree(pid: int) -> Iterator[int]:
    """A process and everything below it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return
    for child in children:
        yield from tree(int(child))


def memory(pid: int) -> tuple[int, int]:
    """(anonymous, all) proportional memory: pages that processes share count once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0), sizes.get("Pss", 0)


# --- The file and the report. ---


def grow(data: Path, out: Path, size: int, seed: int = 0) -> int:
    """Writes conversations until the file has `size` bytes. Returns how many."""
    random_ = random.Random(seed)
    source = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    paragraphs = [
        paragraph
        for line in source
        for message in line["messages"]
        if message["role"] == "assistant"
        for paragraph in message["content"].split("\n\n")
    ]
    written = count = 0
    with out.open("w", encoding="utf-8") as file:
        while written < size:
            line = random_.choice(source)
            messages = [dict(message) for message in line["messages"]]
            for message in messages:
                if message["role"] == "user":
                    message["content"] = f"{count}. {message['content']}"
                elif message["role"] == "assistant":
                    parts: list[str] = message["content"].split("\n\n")
                    parts[random_.randrange(len(parts))] = random_.choice(paragraphs)
                    message["content"] = "\n\n".join(parts)
            text = json.dumps({**line, "messages": messages}, ensure_ascii=False) + "\n"
            file.write(text)
            written += len(text.encode())
            count += 1
    return count


def markdown(source: Origin, size: int, conversations: int, runs: dict[str, list[Run]]) -> str:
    first = next(iter(runs))

    def mid(name: str, field: str) -> float:
        return median(getattr(run, field) for run in runs[name])

    def row(name: str) -> Sequence[str]:
        seconds, pairs = mid(name, "seconds"), list(zip(runs[first], runs[name], strict=True))
        return (
            name,
            number(seconds),
            number(size / 1e6 / seconds),
            number(mid(name, "tokens") / seconds),
            f"{median(a.seconds / b.seconds for a, b in pairs):.2f}x",
            number(mid(name, "cpu_seconds")),
            f"{mid(name, 'anonymous') / 1e6:,.0f} ({mid(name, 'resident') / 1e6:,.0f})",
            f"{median(b.anonymous / a.anonymous for a, b in pairs):.2f}",
            f"{mid(name, 'disk') / 1e6:,.0f}",
        )

    columns = "seconds, MB/s, tokens/s, speed, processor s, memory MB, memory ratio, disk MB"
    return page(
        "Preparing data: ours against the stock way",
        source,
        [f"{size / 1e6:,.0f} MB, {conversations:,} conversations; byte-level BPE of 8,000 words"],
        f"{ABOUT}\nMedians of {len(runs[first])} a side. Speed and memory ratio: to {first}.\n",
        table(("", *columns.split(", ")), map(row, runs)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Race of preparing data.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with messages")
    parser.add_argument("--megabytes", type=float, default=1000, help="how large a file to make of it")
    parser.add_argument("--sides", nargs="+", default=["stock-1", "ours-1", f"ours-{os.cpu_count()}"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--scratch", type=Path, help="where the large files go (default: the temporary directory)"
    )
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args()

    import datasets
    import tokenizers
    import transformers

    from benchmarks.race.prepare_model import WORDS, train_tokenizer

    versions = {module.__name__: module.__version__ for module in (datasets, tokenizers, transformers)}
    source = origin(["python", "-m", "benchmarks.race.prepare", *sys.argv[1:]], versions)
    with tempfile.TemporaryDirectory(dir=given.scratch, prefix="prepare-race-") as name:
        scratch = Path(name)
        file, model = scratch / "data.jsonl", scratch / "model"
        conversations = grow(given.data, file, int(given.megabytes * 1e6))
        train_tokenizer(given.data, WORDS).save_pretrained(model)
        runs: dict[str, list[Run]] = {side_: [] for side_ in given.sides}
        for _ in range(given.repeats):
            for side_ in given.sides:
                runs[side_].append(measure(side_, file, model, scratch))
                print(runs[side_][-1], flush=True)
        size, figures = file.stat().st_size, [asdict(run) for each in runs.values() for run in each]
        content = {"bytes": size, "conversations": conversations, "runs": figures}
        publish(given.out, "prepare", source, markdown(source, size, conversations, runs), content)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(sys.argv[2], *(Path(word) for word in sys.argv[3:7]))
    else:
        main()
