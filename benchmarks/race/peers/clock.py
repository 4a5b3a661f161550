"""What a peer's trainer is measured with: a callback of transformers, which all four of them accept.

It runs in the peer's own environment, so it needs nothing of ours but `job.py`.
"""

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.child import read, write
from benchmarks.race.job import Job, Meter, Result, memory_now, memory_peak


@dataclass
class Counted:
    """What one optimizer step was made of, over all its passes."""

    tokens: int = 0
    targets: int = 0
    computed: int = 0


def tokens_in(tokens_BT: Any, mask: Any, padding: int) -> int:
    """Positions that hold a token. A mask of every pair says so on its diagonal: true, or 0 to be added."""
    if mask is None:  # rows without one may still be padded at the end
        return int((tokens_BT != padding).sum())
    if mask.dim() == 2:
        return int((mask > 0).sum())
    diagonal = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return int((diagonal if diagonal.dtype == torch.bool else diagonal == 0).sum())


@dataclass
class Clock(TrainerCallback):
    """Reads the meter when training starts and after each step, and looks at what the model is given.

    What was trained is saved when training ends, after the last reading.
    """

    export: Path
    padding: int  # the token
    meter: Meter = field(default_factory=Meter)
    steps: list[Counted] = field(default_factory=list[Counted])
    passes: Counted = field(default_factory=Counted)
    memory_before: int = field(default_factory=memory_now)
    memory_loaded: int = 0
    memory_peak: int = 0
    trainable: int = 0

    def count(self, module: Any, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
        tokens_BT, labels_BT = given["input_ids"], given["labels"]
        self.passes.computed += tokens_BT.numel()
        self.passes.tokens += tokens_in(tokens_BT, given.get("attention_mask"), self.padding)
        self.passes.targets += int((labels_BT[:, 1:] != -100).sum())

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.register_forward_pre_hook(self.count, with_kwargs=True)
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.memory_loaded = memory_now()
        self.meter.read()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.read()
        self.steps.append(self.passes)
        self.passes = Counted()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.memory_peak = memory_peak()
        model.save_pretrained(self.export)

    def result(self, peer: str, packages: tuple[str, ...]) -> Result:
        return Result(
            side=peer,
            wall_seconds=self.meter.wall_seconds(),
            cpu_seconds=self.meter.cpu_seconds(),
            tokens=[step.tokens for step in self.steps],
            targets=[step.targets for step in self.steps],
            computed=[step.computed for step in self.steps],
            memory_before=self.memory_before,
            memory_loaded=self.memory_loaded,
            memory_peak=self.memory_peak,
            trainable=self.trainable,
            versions={name: version(name) for name in (*packages, "torch", "transformers", "peft")},
        )


@dataclass(frozen=True)
class Task:
    """The command line of a peer: JOB RESULT [setting=JSON ...]. Settings are in the peer's own
    words and go before those of its file: for trying others."""

    job: Job
    result: Path
    settings: dict[str, Any]

    @property
    def scratch(self) -> Path:
        """An empty directory of the peer's own."""
        return Path(self.job.cache)

    def clock(self) -> Clock:
        """To be made when everything is imported and nothing is loaded."""
        config = json.loads((Path(self.job.model) / "config.json").read_text())
        return Clock(Path(self.job.export), padding=config["pad_token_id"])

    def hand_in(self, clock: Clock, peer: str, *packages: str) -> None:
        write(self.result, clock.result(peer, packages))


def task(words: list[str]) -> Task:
    job, result, *settings = words
    pairs = [setting.partition("=") for setting in settings]
    return Task(read(Path(job), Job), Path(result), {name: parsed(value) for name, _, value in pairs})


def parsed(value: str) -> Any:
    """JSON, or else the word itself."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
