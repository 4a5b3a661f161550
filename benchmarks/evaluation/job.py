"""What both sides of the comparison are told and what they hand back: one JSON file each way."""

from dataclasses import dataclass
from typing import Any, Literal

Prompts = Literal["shipped", "honest"]


@dataclass(frozen=True)
class Job:
    """One evaluation of a whole set. `data`: conversations that end with an answer; that one is asked for."""

    model: str
    data: str
    cache: str
    batch: int
    max_new_tokens: int
    threads: int
    dtype: str = "bfloat16"
    device: str = "cpu"
    prompts: Prompts = "honest"  # of the stock way; ours has no others


@dataclass(frozen=True)
class Answer:
    """One question. `said` and `right` are the texts that were scored, whatever is in them; `answer` and
    `reference` the same without the token that ended them and without padding."""

    prompt: str
    reference: str
    answer: str
    right: str
    said: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Result:
    """Seconds by wall clock. Loading is in `process` alone: within training nobody loads."""

    side: str
    whole: float  # how long training would stand still
    generation: float
    metrics: float  # what comes after generation, not beside it
    process: float  # from its first import to the end
    tokens: int  # generated, up to each one's end
    shown: int  # questions whose prompt holds the reference
    figures: dict[str, float]
    answers: list[Answer]
    versions: dict[str, str]


def holds(prompt: list[int], part: list[int]) -> bool:
    """Whether all of `part` stands in the prompt, in one piece."""
    width = len(part)
    return any(prompt[at : at + width] == part for at in range(len(prompt) - width + 1))


def result_of(answers: list[dict[str, Any]], **fields: Any) -> Result:
    """From its JSON."""
    return Result(**fields, answers=[Answer(**answer) for answer in answers])
