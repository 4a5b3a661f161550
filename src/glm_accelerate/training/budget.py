"""The share of evaluation, held at `evaluate.budget`: how often it comes and on how many samples follows from
what was measured. That changes only as a checkpoint is saved, which holds it: a resumed run evaluates the
steps that it repeats as before.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol.messages import EvaluationResult
from glm_accelerate.plan.budget import Costs, Pace, chosen, percent
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.training.life import Life
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.state import Progress

FIRST = 10  # steps after which those of this start are known well enough
CHANGED, FAR = 1.1, 1.25  # times that the pace is off: from when on it changes, and asks for a checkpoint
LATEST = 5  # evaluations that tell what a sample takes


@dataclass(slots=True)
class Budget:
    """One rank's part in it: the first measures and decides. `share`: of all machines, what evaluates beside
    training; 1: training waits.
    """

    life: Life
    plan: RunPlan
    section: EvaluateSection
    progress: Progress
    pace: Pace  # at this start
    share: float
    _began: float = field(default_factory=time.perf_counter)
    _waited: float = 0.0  # seconds since then that training waited for evaluations
    _spent: float = 0.0  # machine seconds of evaluations since then
    _samples: deque[float] = field(default_factory=lambda: deque[float](maxlen=LATEST))  # ... of one sample
    _first: tuple[int, float] | None = (
        None  # the first step of this start, and seconds of training until then
    )
    _wanted: bool = False

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Training waits meanwhile."""
        began = time.perf_counter()
        yield
        self._waited += (seconds := time.perf_counter() - began)
        self._spent += seconds

    def received(self, result: EvaluationResult) -> None:
        """On the first rank: what an evaluation took."""
        if self.share < 1:
            self._spent += self.share * result.seconds
        if result.status == "done" and (samples := max(result.samples, result.asked)):
            self._samples.append(self.share * result.seconds / samples)

    def after(self, step: int, *, evaluated: bool) -> None:
        """Look whether the pace is far off."""
        if self._first is None:
            self._first = step, self._trained
        elif self.life.ranks.first and (evaluated or step - self._first[0] == FIRST):
            self._wanted = _off(self._measured(), self.progress.pace or self.pace, FAR)

    def wanted(self) -> bool:
        """Whether a checkpoint is to be made, for the pace to change. Says so once."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def at_save(self) -> None:
        """Go on by what was measured. The checkpoint holds what is decided."""
        now = self.progress.pace or self.pace
        new = Pace(**self.life.ranks.decide(lambda: asdict(self._measured())))
        step = self.progress.position
        done = step == self.plan.steps
        if done or not _off(new, now, CHANGED):
            new = replace(new, every=now.every, samples=now.samples)
        self.progress.pace = new
        taken = new.spent / max(1e-9, new.trained + (new.spent if self.share >= 1 else 0))
        said = f"evaluation took {percent(taken)} of the time, of {percent(self.section.budget or 0)}"
        if not done and (new.every, new.samples) != (now.every, now.samples):
            said += f": from here on every {new.every:,} steps, up to {new.samples:,} samples"
            said += f" (before: {now.every:,} and {now.samples:,})"
        elif not done:
            return
        fields = {"step": step, "share": taken, "every": new.every, "samples": new.samples, "said": said}
        self.life.events.emit("decision", fields)

    @property
    def _trained(self) -> float:
        """Seconds of training alone, in this start and before."""
        return self.pace.trained + time.perf_counter() - self._began - self._waited

    def _measured(self) -> Pace:
        """The pace by what is known. Until something is, it stays."""
        now, position = self.progress.pace or self.pace, self.progress.position
        spent, trained = self.pace.spent + self._spent, self._trained
        left, new = self.plan.steps - position, now
        if self._first is not None and position > self._first[0] and self._samples and left:
            step = (trained - self._first[1]) / (position - self._first[0])
            training, sample = trained + left * step, median(self._samples)
            costs = Costs(self.plan.steps, left, training, spent, sample, self.share)
            new = chosen(self.section, self.plan.evaluate_samples, costs)
        return replace(new, spent=spent, trained=trained)


def is_due(step: int, plan: RunPlan, progress: Progress) -> bool:
    """Whether the weights are evaluated after a step."""
    if step == plan.steps:
        return True
    if progress.pace is None:
        return step % plan.evaluate_every == 0
    return step - max(progress.judging.requested, default=0) >= progress.pace.every


def _off(new: Pace, now: Pace, times: float) -> bool:
    pairs = (new.every, now.every), (new.samples, now.samples)
    return any(max(pair) > times * min(pair) for pair in pairs)


def budget_of(settled: Settled, life: Life, progress: Progress) -> Budget | None:
    """None where evaluation has no budget. An evaluator on spare cores has its share of those that are busy;
    beside accelerators it counts as one of them.
    """
    section, plan = settled.config.evaluate, settled.plan
    if section.budget is None or not plan.evaluate_every:
        progress.pace = None
        return None
    pace = progress.pace = progress.pace or Pace(plan.evaluate_every, plan.evaluate_first)
    share = 1.0
    if plan.evaluate_where == "beside":
        one, all_ranks = plan.evaluate_threads, plan.ranks
        if plan.evaluate_device == "cpu" == plan.device:
            all_ranks *= torch.get_num_threads()
        else:
            one = 1
        share = one / (one + all_ranks)
    return Budget(life, plan, section, progress, pace, share)
