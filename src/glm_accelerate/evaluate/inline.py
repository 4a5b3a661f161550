"""Evaluation between two steps, while training waits: always the same samples, so that steps compare.

held-out store -even_choice-> samples -batches-> loss
                                      -generate-> answers -> evals/<step>-<plan>-<attempt>.json
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from glm_accelerate.data.order import even_choice
from glm_accelerate.data.pipeline import Samples, batches
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.evaluate.results import Result, plan_hash, write_result
from glm_accelerate.evaluate.score import Loss, Matches, exact_match, held_out_loss
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

SEED = 0  # of the choice of samples: not the run's, so that runs compare too

Metric = Literal["loss", "exact_match"]


class HeldOut(Samples, Protocol):
    """Samples that are never trained on."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class InlineEvaluator:
    """Judges a model and publishes what it found. What goes wrong with an evaluation never ends training."""

    held_out: HeldOut
    samples: int  # at most so many a time
    micro_tokens: int
    tokenizer: Tokenizer
    stops: Collection[int]  # tokens that end an answer
    metrics: Sequence[Metric]
    max_new_tokens: int
    run_dir: Path
    attempt: int
    publishes: bool = True  # one of several ranks does; all compute the same

    @property
    def chosen(self) -> Sequence[int]:
        """The numbers of the samples that are judged, the same at every step."""
        return even_choice(len(self.held_out), self.samples, SEED)

    @property
    def plan(self) -> str:
        """Names what is asked. How samples were written (template, labels) is in the store's fingerprint."""
        return plan_hash(
            {
                "store": self.held_out.fingerprint,
                "samples": list(self.chosen),
                "tokenizer": self.tokenizer.fingerprint,
                "stops": sorted(self.stops),
                "metrics": sorted(self.metrics),
                "max_new_tokens": self.max_new_tokens,
            }
        )

    def evaluate(self, model: Decoder, step: int) -> dict[str, object]:
        """Publishes the result of this step; returns the fields of its `eval` event."""
        began = time.perf_counter()
        loss: Loss | None = None
        matches: Matches | None = None
        reason: str | None = None
        try:
            if "loss" in self.metrics:
                loss = self._loss(model)
            if "exact_match" in self.metrics:
                matches = self._matches(model)
        except UserError as error:
            reason = str(error)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            reason = (
                f"out of memory: {str(error).partition('. ')[0]} (evaluate fewer samples, or shorter answers)"
            )
        if loss is not None and not math.isfinite(loss.mean):
            loss, reason = None, reason or "the held-out loss is not finite"
        result = Result(
            step=step,
            plan=self.plan,
            attempt=self.attempt,
            status="done" if reason is None else "failed",
            loss=None if loss is None else loss.mean,
            ci95=None if loss is None else loss.ci95,
            samples=len(self.chosen),
            total=len(self.held_out),
            metrics={} if matches is None else {"exact_match": matches.share},
            intervals={} if matches is None else {"exact_match": matches.ci95},
            seconds=round(time.perf_counter() - began, 3),
            reason=reason,
        )
        if self.publishes:
            write_result(self.run_dir, result, () if matches is None else matches.predictions)
        return result.event()

    def _loss(self, model: Decoder) -> Loss:
        return held_out_loss(model, batches(self.held_out, self.chosen, "pack", self.micro_tokens))

    def _matches(self, model: Decoder) -> Matches:
        return exact_match(
            model,
            [self.held_out[number] for number in self.chosen],
            self.tokenizer,
            stops=self.stops,
            max_new_tokens=self.max_new_tokens,
        )
