"""The demo from beginning to end: lessons, before, training with an interruption, after, and what comes next.

Training is `train` on a config file, as it is for anybody; only the sizes are small.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.assemble.model import open_model
from glm_accelerate.config.load import load_config
from glm_accelerate.data.encode import encode_prompt
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import Message
from glm_accelerate.demo.task import LESSONS, Example, examples, vocabulary, write_examples
from glm_accelerate.demo.tiny import write_tiny
from glm_accelerate.evaluate.protocol.history import best_step, main_results
from glm_accelerate.evaluate.protocol.ledger import results
from glm_accelerate.evaluate.report.picture import held_out_curve
from glm_accelerate.generate.answer import generate
from glm_accelerate.observe.chart import losses, sparkline
from glm_accelerate.observe.console import ConsoleObserver
from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.screen import say
from glm_accelerate.training.run import train

SOLVED = 0.9  # share of the held-out questions that must be answered to the letter
STEPS = 1200
TRAINED_ON, HELD_OUT = 24_000, 200
LONGEST_ANSWER = 64
THREADS = 1  # two gain a quarter at this size, and lose everything where another program wants a core too
WIDEST = 60  # characters of an answer that are shown

CONFIG = """\
model: {{path: {model}, dtype: float32}}
adapt: {{method: full}}
data: {{train: {train}, dev: {dev}, cache: {cache}}}
train: {{steps: {steps}, step_samples: 24, micro_tokens: 2048}}
precision: {{compute: float32}}
optim: {{learning_rate: 2.0e-3, betas: [0.9, 0.95], warmup: 0.05}}
checkpoint: {{every: {every}}}
evaluate: {{every: {every}, metrics: [loss, exact_match], max_new_tokens: {longest}}}
"""

COMMAND = "glm-accelerate"
NEXT = """\
With your own data, one conversation a line · 换成您自己的数据，每行一段对话:

  {{"messages": [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]}}

  {command} data  preset:glm4-9b-0414-lora data.train=my.jsonl model.path=/models/GLM-4-9B-0414
  {command} train preset:glm4-9b-0414-lora data.train=my.jsonl model.path=/models/GLM-4-9B-0414 --run runs/my
  {command} chat  runs/my

"""


def show(directory: Path, steps: int, console: Console) -> bool:
    """The whole demo, in a new directory. Returns whether the lessons were learnt."""
    torch.set_num_threads(THREADS)
    say(console, "A tiny GLM-4 with random weights learns five lessons that are made up on the spot.")
    say(console, "一个随机初始化的微型 GLM-4，从零学会五种现场生成的题目（中英文）。\n")
    asked = write_all(directory, steps)
    show_answers("Before training · 训练前", asked, answers(directory / "model", asked), console)
    train_interrupted(directory, steps, console)
    show_answers("After training · 训练后", asked, answers(directory, asked), console)
    events = read_events(directory / "events.jsonl")
    picture = directory / "loss.svg"
    learnt, title = losses(events, "step"), "A tiny GLM-4 learns its lessons"
    svg = held_out_curve(learnt, main_results(results(directory)), [], best_step(directory), title)
    picture.write_text(svg, encoding="utf-8")
    say(console, f"loss {sparkline([loss for _, loss in learnt])} {picture}")
    first, last = scores(events)
    solved = last >= SOLVED
    verdict = "Solved · 完成" if solved else f"Not solved ({SOLVED:.0%} are wanted) · 未完成"
    say(console, f"answered to the letter: {first:.1%} of the held-out questions before, {last:.1%} after")
    say(console, f"{verdict}\n", style="bold green" if solved else "bold red")
    beside = Path(sys.executable).with_name(COMMAND)  # whoever has only run `make demo` is in no environment
    command = COMMAND if shutil.which(COMMAND) or not beside.is_file() else os.path.relpath(beside)
    for text in (
        f"Ask it yourself · 亲自试试:\n\n  {command} chat {directory}\n",
        NEXT.format(command=command),
    ):
        console.print(text, highlight=False, markup=False, soft_wrap=True)  # commands that can be copied
    return solved


def write_all(directory: Path, steps: int) -> list[Example]:
    """Model, data and config. Returns one held-out question of each lesson, in alternating languages."""
    data = directory / "data"
    data.mkdir(parents=True)
    write_tiny(directory / "model", vocabulary())
    held_out = examples(HELD_OUT, seed=2, held_out=True)
    write_examples(data / "train.jsonl", examples(TRAINED_ON, seed=1, held_out=False))
    write_examples(data / "dev.jsonl", held_out)
    paths = {
        "model": directory / "model", "train": data / "train.jsonl", "dev": data / "dev.jsonl",
        "cache": directory / "cache",
    }  # fmt: skip
    quoted = {name: json.dumps(str(path), ensure_ascii=False) for name, path in paths.items()}
    config = CONFIG.format(**quoted, steps=steps, every=max(2, steps // 4), longest=LONGEST_ANSWER)
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    wanted = [(lesson, number % 2 == 0) for number, lesson in enumerate(LESSONS)]
    return [
        next(item for item in held_out if (item.lesson, item.question.isascii()) == one) for one in wanted
    ]


def train_interrupted(directory: Path, steps: int, console: Console) -> None:
    """Train as a user would, stop half-way as a signal would, and run the same again."""
    config = load_config(directory / "config.yaml")
    train(config, directory, observers=[ConsoleObserver(console)], stop_after=steps // 2)
    line = "\nInterrupted on purpose, as by Ctrl-C: the same command goes on where it was."
    say(console, line, style="bold")
    say(console, "故意中断：再次运行同一命令，即从断点继续，结果分毫不差。\n", style="bold")
    train(config, directory, observers=[ConsoleObserver(console)])


def answers(path: Path, asked: Sequence[Example]) -> list[str]:
    """The answers of the model at `path`, or of the newest checkpoint of the run there."""
    opened = open_model(path)
    tokenizer, template = load_tokenizer(opened.base, opened.template), get_template(opened.template)
    prompts = [encode_prompt([Message("user", item.question)], template, tokenizer) for item in asked]
    stops = {tokenizer.special(name) for name in template.stops}
    generated = generate(opened.model, prompts, stops=stops, max_new_tokens=LONGEST_ANSWER)
    return [tokenizer.decode(tokens).strip() for tokens in generated]


def show_answers(title: str, asked: Sequence[Example], given: Sequence[str], console: Console) -> None:
    """A table of questions and answers; right ones have a mark."""
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("question · 问")
    table.add_column("answer · 答")
    table.add_column("")
    for item, answer in zip(asked, given, strict=True):
        right = answer == item.answer
        shown = Text(visible(answer)) if answer else Text("(nothing)", "dim")
        mark = Text("✓", "green") if right else Text("✗", "red")
        table.add_row(Text(item.question), shown, mark)
    console.print(table)


def scores(events: Sequence[dict[str, object]]) -> tuple[float, float]:
    """The share of right answers before and after, in the trainer's own evaluations."""
    measured = [cast("dict[str, float]", event["metrics"]) for event in events if event["kind"] == "eval"]
    return measured[0].get("exact_match", 0.0), measured[-1].get("exact_match", 0.0)


def visible(text: str) -> str:
    """An untrained model's answer, shortened, and without what would move the cursor."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
    return shown if len(shown) <= WIDEST else f"{shown[:WIDEST]}…"
