"""One side of the comparison in a process of its own: answers to the same prompts, prefill and decode apart.

python -m benchmarks.evaluation.generation_sides JOB RESULT
"""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.child import read, write
from glm_accelerate.generate import answer, decoding
from glm_accelerate.generate.decoding import Decoding, NewTokens, Row
from glm_accelerate.generate.sample import Sampling, pick
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.weights import load_model

Clock = Callable[[], float]


@dataclass(frozen=True)
class Job:
    """`lengths`: after so many tokens each answer ends, whatever the model would say; None: at `new`."""

    side: Literal["ours", "theirs"]
    model: str
    prompts: list[list[int]]
    stops: list[int]
    lengths: list[int] | None
    batch: int | None
    new: int
    dtype: str
    device: str
    threads: int
    warm: bool = True


@dataclass(frozen=True)
class Done:
    """Answers without their stop tokens, and seconds."""

    answers: list[list[int]]
    whole: float
    prefill: float

    @property
    def tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    @property
    def decode(self) -> float:
        return self.whole - self.prefill


def clock_of(device: str) -> Clock:
    """Wall time, once the device has done what it was given."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


# --- Ours. ---


def ours(job: Job) -> Done:
    model = load_model(Path(job.model), dtype=getattr(torch, job.dtype)).to(job.device).eval()
    native = job.dtype == "bfloat16" and job.device == "cpu" and native_library() is None
    bind_operators(model, compiled=native)
    now, prefill = clock_of(job.device), [0.0]
    read = Decoding.read

    def timed(self: Decoding, coming: Any) -> NewTokens:
        began = now()
        tokens = read(self, coming)
        prefill[0] += now() - began
        return tokens

    def answers(prompts: Sequence[list[int]], new: int) -> list[list[int]]:
        return answer.generate(model, prompts, stops=(), max_new_tokens=new, batch=job.batch)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Decoding, "read", timed))
        if job.lengths is not None:
            stack.enter_context(ended_at(job.lengths, job.stops))
        if job.warm:
            answers(job.prompts[:4], 4)
        prefill[0], began = 0.0, now()
        tokens = answers(job.prompts, job.new)
        return Done(tokens, now() - began, prefill[0])


@contextmanager
def ended_at(lengths: Sequence[int], stops: Sequence[int]) -> Generator[None]:
    """Row n stops when it has lengths[n] tokens: the token after those, whatever it is, is its stop token."""

    def take(row: Row, tokens: Sequence[int], _: Any) -> bool:
        for token in tokens:
            if len(row.answer) == lengths[row.number]:
                return True
            row.answer.append(token)
            if not row.left:
                return True
        return False

    def without_stops(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
        for stop in stops:  # a view each: a list would be copied to the device, which waits
            logits_BV[:, stop] = float("-inf")
        return pick(logits_BV, sampling, generator)

    with patch.object(answer, "take", take), patch.object(decoding, "pick", without_stops):
        yield


# --- Theirs, as the stock script calls it. ---


class Schedule:
    """A LogitsProcessor that lets row n say its stop token after lengths[n] tokens, and not before."""

    def __init__(self, lengths: Tensor, prompt: int, stops: list[int]) -> None:
        self.lengths_B, self.prompt, self.stops = lengths, prompt, stops

    def __call__(self, tokens_BT: Tensor, scores_BV: Tensor) -> Tensor:
        over_B = tokens_BT.shape[1] - self.prompt >= self.lengths_B
        for stop in self.stops:  # a view each: a list would be copied to the device, which waits
            scores_BV[:, stop] = float("-inf")
        scores_BV[:, self.stops[0]].masked_fill_(over_B, float("inf"))
        return scores_BV


def theirs(job: Job) -> Done:
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    model = cast(Any, model).to(job.device).eval()
    model.generation_config.eos_token_id = job.stops if job.lengths is not None else None
    model.generation_config.pad_token_id = job.stops[0]
    now, size = clock_of(job.device), job.batch or len(job.prompts)

    @torch.no_grad()
    def answers(new: int, first: int, behind: int) -> list[list[int]]:
        prompts = job.prompts[first:behind]
        longest = max(map(len, prompts))
        tokens = torch.tensor([[job.stops[0]] * (longest - len(p)) + p for p in prompts], device=job.device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=job.device)
        processors = LogitsProcessorList()
        if job.lengths is not None:
            lengths = torch.tensor(job.lengths[first:behind], device=job.device)
            processors.append(cast(Any, Schedule(lengths, longest, job.stops)))
        out = model.generate(
            input_ids=tokens,
            attention_mask=seen,
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            logits_processor=processors,
        )[:, longest:].tolist()
        if job.lengths is None:
            return out
        return [row[:length] for row, length in zip(out, job.lengths[first:behind], strict=True)]

    def everything(new: int) -> list[list[int]]:
        spans = ((start, start + size) for start in range(0, len(job.prompts), size))
        return [row for first, behind in spans for row in answers(new, first, min(behind, len(job.prompts)))]

    if job.warm:
        answers(4, 0, min(size, len(job.prompts)))
    began = now()
    everything(1)
    prefill = now() - began
    began = now()
    tokens = everything(job.new)
    return Done(tokens, now() - began, prefill)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first token that differs. None: the answers are the same."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), None)
    return min(len(ours), len(theirs)) if place is None and len(ours) != len(theirs) else place


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    write(result_file, ours(job) if job.side == "ours" else theirs(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
