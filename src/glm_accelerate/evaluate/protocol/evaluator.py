"""Whoever evaluates beside training: claims a request, holds its snapshot, answers, and looks for the next.

waiting -claim-> lease -examine-> Findings -publish once->   until the run is finished
An evaluation that goes wrong costs itself alone: it becomes a result that says why.
"""

import errno
import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.protocol.ledger import claim, listing, publish, read_items
from glm_accelerate.evaluate.protocol.messages import (
    EvaluationResult,
    Examiner,
    Findings,
    Request,
    parse_result,
    sound,
    whole_plan,
)
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.parallel.ranks import ALONE, PATIENCE, Ranks, arrived, peer_ended
from glm_accelerate.runtime.device import current_device, device_lost
from glm_accelerate.runtime.errors import UserError

POLL = 0.5  # seconds between two looks for something to do
LOCKSTEP = timedelta(seconds=60)  # that a rank which failed waits for the others before it ends the job
HALTS = ("SIG", "asked to stop", "a signal to another rank")  # how reasons begin that are not a run's end
TAIL = 1 << 16  # bytes at the end of a log that are read for its last event
FULL = (errno.ENOSPC, errno.EDQUOT)  # what passes


@dataclass(frozen=True, slots=True)
class Following:
    """How a run is followed. `tell` hears `claimed STEM` and `done STEM`; `before` is called between two."""

    once: bool = False  # what waits now, no more
    oldest: bool = False  # first; else the newest
    refuses: bool = False  # a run that asks what this evaluator does not answer; else such a request fails
    poll: float = POLL
    tell: Callable[[str], object] = str
    before: Callable[[], object] = bool


AS_IT_COMES = Following()


class Lost(Exception):
    """Another rank did not come to the end of an evaluation: this job can answer nothing more."""


def follow(run: Path, examiner: Examiner, how: Following = AS_IT_COMES, ranks: Ranks = ALONE) -> None:
    """Answer requests until the run is finished. The first rank claims and publishes, all examine."""
    while True:
        with _claimed(run, how, ranks, examiner.plan) as request:
            if request is None:
                return
            how.before()
            how.tell(f"claimed {request.stem}")
            findings, broken = _together(answer(run, request, examiner, ranks), request, ranks)
            if ranks.first or broken:
                _publish(run, findings, how.poll)
            how.tell(f"done {request.stem}")
            if broken or device_lost(findings.result.reason or ""):
                raise Lost(findings.result.reason)


def answer(run: Path, request: Request, examiner: Examiner, ranks: Ranks = ALONE) -> Findings:
    """What was found, or why nothing was: one evaluation that goes wrong costs only itself."""
    try:
        try:
            return _answer(run, request, examiner)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error) or ranks.count > 1 or not examiner.smaller():
                raise
        gc.collect()  # what the error held is free now
        current_device().empty_cache()
        return _answer(run, request, examiner)
    except Exception as error:
        if isinstance(error, RuntimeError) and peer_ended(error):
            raise  # the other rank has said why, or was killed: then another job may answer
        _note(traceback.format_exc().rstrip())
        reason = _worded(error)
    return Findings(
        EvaluationResult(request.step, request.plan, request.attempt, "failed", reason=reason, by=_by())
    )


def finished(run: Path) -> bool:
    """Whether nothing more will be asked: its last word is that training came to its end, not to a halt."""
    path = run / "events.jsonl"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:  # torn, or being written
        return False
    if not isinstance(last, dict):
        return False
    event = cast("dict[str, object]", last)
    return event.get("kind") == "stop" and not str(event.get("reason")).startswith(HALTS)


def all_count(run: Path) -> bool:
    """Whether no evaluation of a run may be left out, so that the oldest is to be answered first."""
    path = run / "config.yaml"
    if not path.is_file():
        return False
    section = load_config(path).evaluate
    return section.keep == "all" or section.decides


@contextmanager
def holding(run: Path, request: Request) -> Generator[None]:
    """While the weights are read: nobody deletes them, nor those of the best, if they are still there."""
    with ExitStack() as held:
        held.enter_context(lease(run / request.weights))
        if request.against_weights is not None:
            with suppress(Damaged):  # gone: then it is compared with what was measured
                held.enter_context(lease(run / request.against_weights))
        yield


def _answer(run: Path, request: Request, examiner: Examiner) -> Findings:
    _require_same(request, examiner.plan)
    against = None if request.against is None else read_items(run, request.against)
    with holding(run, request):
        found = examiner.examine(request, str(run), against)
    named = {"step": request.step, "plan": request.plan, "attempt": request.attempt}
    result = sound(replace(found.result, by={**_by(), **found.result.by}, **named))
    said = json.dumps(asdict(result), allow_nan=False)  # whatever an examiner says has to be readable
    return replace(found, result=parse_result(said, Path(f"{request.stem}.json")))


def _publish(run: Path, findings: Findings, pause: float) -> None:
    """As soon as it can be written: a disk that is full for a while does not cost what was found. It stays
    claimed until then, and a trainer gives it up when that takes too long.
    """
    with suppress(OSError):  # what an examiner of one's own has printed
        sys.stdout.flush()
    told = False
    while True:
        try:
            publish(run, findings)
            return
        except OSError as error:
            if not told:
                _note(f"the answer about step {findings.result.step} waits, as it cannot be written: {error}")
            told = True
        time.sleep(pause)


def _note(said: str) -> None:
    """To whoever watches, or the trainer's log of it. That may be on the full disk, too."""
    with suppress(OSError):
        sys.stderr.write(f"{said}\n")


def _worded(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    if ran_out(error):
        return f"out of memory: {first.partition('. ')[0]} (fewer samples, or shorter answers)"
    return f"{type(error).__name__}: {first}"


def _require_same(request: Request, plan: str) -> None:
    ours = whole_plan(plan) if request.whole else plan
    if request.plan != ours:
        raise UserError(
            f"the trainer asks plan {request.plan}, this evaluator would answer {ours}: another version,"
            " tokenizer, config, data or file of a metric",
            cure="start the evaluator anew, with the trainer's own",
        )


def _by() -> dict[str, str]:
    """Who evaluates."""
    ours = f"{version('glm-accelerate')}, torch {torch.__version__}"
    return {"host": socket.gethostname(), "process": str(os.getpid()), "version": ours}


@contextmanager
def _claimed(run: Path, how: Following, ranks: Ranks, plan: str) -> Generator[Request | None]:
    """The next request that is ours to answer; None when there is nothing to wait for any more."""
    with ExitStack() as held:
        said: dict[str, Any] | None = ranks.decide(lambda: _next(run, how, held, plan))
        yield None if said is None else Request(**said)


def _next(run: Path, how: Following, held: ExitStack, plan: str) -> dict[str, Any] | None:
    told: set[str] = set()

    def note(*reasons: str) -> None:
        for reason in set(reasons) - told:
            _note(reason)
        told.update(reasons)

    while True:
        there = listing(run, answered=False)
        note(*there.passed_over)
        for request in there.waiting if how.oldest else reversed(there.waiting):
            if how.refuses:
                _require_same(request, plan)
            try:
                if _is_ours(run, request, held):
                    return asdict(request)
            except OSError as error:
                if how.once or error.errno not in FULL:
                    raise
                note(f"step {request.step} waits, as it cannot be claimed: {error.strerror}")
        if how.once or (not there.waiting and finished(run)):
            return None
        time.sleep(how.poll)


def _is_ours(run: Path, request: Request, held: ExitStack) -> bool:
    """Whether it could be claimed; it is held then."""
    with ExitStack() as tried:  # what another holds is let go here: there may be thousands of looks
        ours = tried.enter_context(claim(run, request))
        if ours:
            held.push(tried.pop_all())
    return ours


def _together(findings: Findings, request: Request, ranks: Ranks) -> tuple[Findings, bool]:
    """The first rank's findings, or why one of them failed; and whether the ranks are out of step for good.

    One that fails alone leaves the others in a collective: it ends the job after a while, and says why.
    """
    if ranks.store is None:
        return findings, False
    failed = findings.result.status == "failed"
    keys = [f"answered-{request.stem}-{rank}" for rank in range(ranks.count)]
    ranks.store.set(keys[ranks.rank], str(findings.result.reason or "") if failed else "")
    while not arrived(ranks.store, keys, LOCKSTEP if failed else PATIENCE):
        if failed:
            return findings, True
    reasons = [ranks.store.get(key).decode() for key in keys]
    worst = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)
    if worst is None:
        return findings, False
    return Findings(replace(findings.result, status="failed", reason=worst, loss=None, ci95=None)), False
