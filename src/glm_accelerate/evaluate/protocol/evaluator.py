"""The evaluator's side of the protocol: claim a request, lease its snapshot, measure, publish, and the next.

waiting -claim-> lease -examine-> Findings -publish once->   until the run is finished
An evaluation that fails becomes a result that says why; the evaluator goes on.
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
from typing import Any

import torch

from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol.ledger import claim, listing, publish, read_sample_losses
from glm_accelerate.evaluate.protocol.messages import (
    Examiner,
    Findings,
    Request,
    failure,
    full_exam_id,
    parse_result,
    to_json,
    with_finite_numbers,
)
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.parallel.ranks import ALONE, PATIENCE, Ranks, arrived, peer_ended
from glm_accelerate.runtime.device import device_lost, present_kind
from glm_accelerate.runtime.errors import UserError

POLL = 0.5  # seconds between two looks for requests
LOCKSTEP = timedelta(seconds=60)  # that a rank which failed waits for the others before it ends the job
INTERRUPTIONS = ("SIG", "asked to stop", "a signal to another rank")  # first words of reasons to go on later
TAIL = 1 << 16  # bytes at the end of a log that are read for its last event
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # may pass


def ignore(message: str = "") -> None:
    """Take no notice."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How to follow a run. `on_message` gets `claimed STEM` and `done STEM`."""

    once: bool = False  # only the requests that wait now
    oldest: bool = False  # the oldest request first; else the newest
    strict: bool = False  # a request of another exam ends the evaluator; else the request fails
    poll: float = POLL
    on_message: Callable[[str], None] = ignore
    backlog_threads: int | None = None  # while several requests wait; else one thread. None: as it is


class RanksOutOfStep(Exception):
    """Another rank did not finish an evaluation: this job cannot go on."""


def follow(run: Path, examiner: Examiner, options: FollowOptions, ranks: Ranks = ALONE) -> None:
    """Evaluate requests until the run is finished. The first rank claims and publishes, all ranks examine."""
    while True:
        with ExitStack() as claims:
            fields: dict[str, Any] | None = ranks.decide(
                lambda claims=claims: _claim_next(run, options, claims, examiner.exam_id)
            )
            if fields is None:
                return
            request = Request(**fields)
            options.on_message(f"claimed {request.stem}")
            findings, broken = _agree(evaluate(run, request, examiner, ranks), request, ranks)
            if ranks.first or broken:
                _publish(run, findings, options.poll)
            options.on_message(f"done {request.stem}")
            if broken or device_lost(findings.result.reason or ""):
                raise RanksOutOfStep(findings.result.reason)


def evaluate(run: Path, request: Request, examiner: Examiner, ranks: Ranks = ALONE) -> Findings:
    """The findings, or a failed result that says why. Out of memory it tries once more with less."""
    try:
        try:
            return _evaluate(run, request, examiner)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error) or ranks.count > 1 or not examiner.smaller():
                raise
        gc.collect()  # what the error referred to is free now
        present_kind().empty_cache()
        return _evaluate(run, request, examiner)
    except Exception as error:
        if isinstance(error, RuntimeError) and peer_ended(error):
            raise  # the other rank gives the reason, or was killed: then another job may evaluate it
        _log(traceback.format_exc().rstrip())
        return Findings(replace(failure(request, "failed", reason_of(error)), by=_by()))


def reason_of(error: Exception) -> str:
    """An error as the reason of a result."""
    if isinstance(error, UserError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    if ran_out(error):
        return f"out of memory: {first.partition('. ')[0]} (evaluate fewer samples, or shorter answers)"
    return f"{type(error).__name__}: {first}"


def finished(run: Path) -> bool:
    """Whether no more requests will come: its last event is the end of training, not an interruption."""
    path = run / "events.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            last = json.loads(file.read().splitlines()[-1])
    except (FileNotFoundError, IndexError, ValueError):  # none yet, or torn, or being written
        return False
    stopped = isinstance(last, dict) and last.get("kind") == "stop"
    return stopped and not str(last.get("reason")).startswith(INTERRUPTIONS)


def evaluates_all(run: Path) -> bool:
    """Whether no evaluation of a run may be left out: then the oldest request comes first."""
    path = run / "config.yaml"
    section = load_config(path).evaluate if path.is_file() else EvaluateSection()
    return section.keep == "all" or section.decides


@contextmanager
def leased(run: Path, request: Request) -> Generator[None]:
    """Leases of a request's weights, and of those to compare with if they are still there: while they are
    read nobody deletes them.
    """
    with ExitStack() as leases:
        leases.enter_context(lease(run / request.weights))
        if request.against_weights is not None:
            with suppress(Damaged):  # gone: then the losses that are on record have to do
                leases.enter_context(lease(run / request.against_weights))
        yield


def _evaluate(run: Path, request: Request, examiner: Examiner) -> Findings:
    _require_same(request, examiner.exam_id)
    baseline = None if request.against is None else read_sample_losses(run, request.against)
    with leased(run, request):
        findings = examiner.examine(request, str(run), baseline)
    by = {**_by(), **findings.result.by}
    names = {"step": request.step, "exam_id": request.exam_id, "attempt": request.attempt}
    result = with_finite_numbers(replace(findings.result, by=by, **names))
    text = json.dumps(to_json(result), allow_nan=False)  # a user's examiner may return what cannot be read
    return replace(findings, result=parse_result(text, Path(f"{request.stem}.json")))


def _by() -> dict[str, str]:
    """Which process evaluates, where and with what version."""
    ours = f"{version('glm-accelerate')}, torch {torch.__version__}"
    return {"host": socket.gethostname(), "process": str(os.getpid()), "version": ours}


def _require_same(request: Request, exam_id: str) -> None:
    ours = full_exam_id(exam_id) if request.whole else exam_id
    if request.exam_id != ours:
        raise UserError(
            f"the trainer asks exam {request.exam_id}, this evaluator would answer {ours}: another version,"
            " tokenizer, config, data or file of a metric",
            cure="start the evaluator anew, with the trainer's own",
        )


def _publish(run: Path, findings: Findings, pause: float) -> None:
    """Publish as soon as it can be written: a disk that is full for a while does not lose a result. The
    request stays claimed until then; the trainer gives it up if that takes too long.
    """
    with suppress(OSError):  # what a user's examiner has printed
        sys.stdout.flush()
    logged = False
    while True:
        try:
            publish(run, findings)
            return
        except OSError as error:
            if not logged:
                _log(f"the answer about step {findings.result.step} waits, as it cannot be written: {error}")
            logged = True
        time.sleep(pause)


def _log(text: str) -> None:
    """Write to stderr, for a trainer's child its log. That may be on the full disk, too."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")


def _claim_next(run: Path, options: FollowOptions, claims: ExitStack, exam_id: str) -> dict[str, Any] | None:
    """The fields of the next request, which `claims` holds; None when no more will come."""
    logged: set[str] = set()

    def log_once(sentence: str) -> None:
        if sentence not in logged:
            _log(sentence)
        logged.add(sentence)

    while True:
        files = listing(run, answered=False)
        for sentence in files.passed_over:
            log_once(sentence)
        for request in files.waiting if options.oldest else reversed(files.waiting):
            if options.strict:
                _require_same(request, exam_id)
            try:
                with ExitStack() as attempt:  # a claim that failed is closed here: there may be thousands
                    if attempt.enter_context(claim(run, request)):
                        claims.push(attempt.pop_all())
                        if options.backlog_threads is not None:
                            torch.set_num_threads(options.backlog_threads if len(files.waiting) > 1 else 1)
                        return asdict(request)
            except OSError as error:
                if options.once or error.errno not in DISK_FULL:
                    raise
                log_once(f"step {request.step} waits, as it cannot be claimed: {error.strerror}")
        if options.once or (not files.waiting and finished(run)):
            return None
        time.sleep(options.poll)


def _agree(findings: Findings, request: Request, ranks: Ranks) -> tuple[Findings, bool]:
    """The first rank's findings, or why one of the ranks failed; and whether they are out of step for good.

    A rank that fails alone leaves the others in a collective: after a while it ends the job, with the reason.
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
