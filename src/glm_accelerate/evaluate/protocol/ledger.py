"""The files by which evaluations are requested, claimed and answered, on any machine that sees the run.

post a request -> claim (a lock that ends with its holder) -> publish once (the first result stays)
`branches.json` names the step from which each attempt resumed: what earlier ones did beyond it is not listed.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.checkpoint.retain import path_aside
from glm_accelerate.data.strict_json import parse
from glm_accelerate.evaluate.protocol.messages import (
    FOLDER,
    EvaluationResult,
    Findings,
    Request,
    failure,
    parse_request,
    parse_result,
    parse_stem,
    stem_of,
    to_json,
    with_finite_numbers,
)
from glm_accelerate.evaluate.statistics.decide import Status
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import make_folder, sync, try_lock, write_beside, write_text

REQUEST, CLAIM, RESULT = ".asked.json", ".claim", ".json"
LOSSES, PREDICTIONS = ".items.json", ".predictions.jsonl"
ENDINGS = (REQUEST, CLAIM, LOSSES, PREDICTIONS, RESULT)  # the longest first, where one ends as another
BRANCHES, PUBLISHING = "branches.json", ".publishing"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Listing:
    """Requests without a result and results, by step and attempt; files that cannot be read, and why."""

    waiting: list[Request]
    results: list[EvaluationResult]
    passed_over: list[str]


def post(run: Path, request: Request) -> None:
    """Write a request, unless its result is there already."""
    make_folder(run / FOLDER)
    if not _path(run, request.stem, RESULT).exists():
        write_text(_path(run, request.stem, REQUEST), _json(to_json(request)))


def waiting(run: Path) -> list[Request]:
    """Requests without a result, by step. A file that cannot be read does not hide the others."""
    return listing(run, answered=False).waiting


def results(run: Path) -> list[EvaluationResult]:
    """All results, by step and attempt."""
    return listing(run).results


def listing(run: Path, *, answered: bool = True) -> Listing:
    """All requests and results. Without `answered` no result is read."""
    found = Listing([], [], [])
    branches = _branches(run)
    for stem, endings in _stems(run).items():
        try:
            if _abandoned(stem, branches):
                continue
            if RESULT in endings:
                result = read(run, stem) if answered else None
                found.results.extend([] if result is None else [result])
            elif REQUEST in endings and (text := _text(_path(run, stem, REQUEST))) is not None:
                found.waiting.append(parse_request(text, _path(run, stem, REQUEST)))
        except UserError as error:
            found.passed_over.append(f"passed over: {error}")
    return found


def read(run: Path, stem: str) -> EvaluationResult | None:
    """One result; None as long as there is none."""
    text = _text(_path(run, stem, RESULT))
    return None if text is None else parse_result(text, _path(run, stem, RESULT))


def read_sample_losses(run: Path, stem: str) -> SampleLosses | None:
    """The losses of an evaluation's samples; None unless it is done and measured some."""
    result, path = read(run, stem), _path(run, stem, LOSSES)
    text = None if result is None or result.status != "done" else _text(path)
    if text is None:
        return None
    try:
        content = parse(text)
        losses, targets = (np.asarray(content[name], np.float64) for name in ("losses", "targets"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not the items of a result: {error}", where=path, cure="move it away") from error
    if losses.ndim != 1 or losses.shape != targets.shape:
        raise UserError("losses and targets differ in number", where=path, cure="move it away")
    return SampleLosses(losses, targets)


@contextmanager
def claim(run: Path, request: Request) -> Generator[bool]:
    """Whether this process may answer it. The lock ends with the process, however that ends."""
    path, posted = _path(run, request.stem, CLAIM), _path(run, request.stem, REQUEST)
    if not posted.exists():
        yield False
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        ours = try_lock(descriptor)
        # Since it was listed, another process may have answered it or abandoned its branch.
        if ours and (_path(run, request.stem, RESULT).exists() or not posted.exists()):
            path.unlink(missing_ok=True)
            ours = False
        if ours:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield ours
    finally:
        os.close(descriptor)


def is_claimed(run: Path, request: Request) -> bool:
    """Whether a process is evaluating it now."""
    try:
        descriptor = os.open(_path(run, request.stem, CLAIM), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def publish(run: Path, findings: Findings) -> bool:
    """Whether this is the result that stays: another may have been first, or the branch was abandoned.

    The files that belong to a result are written before it.
    """
    result = with_finite_numbers(findings.result)
    stem, target = result.stem, _path(run, result.stem, RESULT)
    make_folder(run / FOLDER)
    if _abandoned(stem, _branches(run)) or target.exists():
        return False
    if findings.losses is not None and result.status == "done":
        _write_losses(run, stem, findings.losses)
    if findings.predictions:
        lines = (json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in findings.predictions)
        write_text(_path(run, stem, PREDICTIONS), "".join(lines))
    first = _publish_once(target, _json(to_json(result)))
    if first and findings.baseline_losses is not None and result.against is not None:
        more, before = findings.baseline_losses, read_sample_losses(run, result.against.stem)
        if before is not None and len(before.losses_N) < len(more.losses_N):
            _write_losses(run, result.against.stem, more)
    if not first and (existing := read(run, stem)) is not None and existing.status != "done":
        _remove(run, stem, LOSSES, PREDICTIONS)  # the first result has measured nothing
    _remove(run, stem, REQUEST, CLAIM)
    return first


def withdraw(run: Path, request: Request, status: Status, reason: str) -> bool:
    """Publish why a request is not evaluated. False if another result was first."""
    return publish(run, Findings(failure(request, status, reason)))


def abandon_after(run: Path, step: int, attempt: int) -> list[str]:
    """Attempt `attempt` resumes from `step`: requests, results and snapshots of later steps move aside.

    A process may be evaluating one of them now: `branches.json` makes it drop its result.
    """
    folder, moved = run / FOLDER, list[str]()
    if folder.is_dir():
        branches = {**_branches(run), attempt: step}
        write_text(folder / BRANCHES, _json({str(number): first for number, first in branches.items()}))
        for stem, endings in _stems(run).items():
            if _abandoned(stem, {attempt: step}):
                _remove(run, stem, CLAIM)
                for ending in endings - {CLAIM}:
                    moved += _move_aside(_path(run, stem, ending), run)
    for path in reversed(published(run, "snapshot")):
        if (step_of(path.name, "snapshot") or 0) > step:
            moved += _move_aside(path, run)
    sweep(run)
    return moved


def sweep(run: Path) -> None:
    """Remove what killed evaluators left of answered requests: temporary files, claims, requests.

    Files of requests without a result stay: a process may be working on them.
    """
    for stem, endings in _stems(run).items():
        if RESULT in endings:
            _remove(run, stem, REQUEST, CLAIM)
            for leftover in (run / FOLDER).glob(f".{stem}.*"):
                leftover.unlink(missing_ok=True)


def _path(run: Path, stem: str, ending: str) -> Path:
    return run / FOLDER / f"{stem}{ending}"


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _text(path: Path) -> str | None:
    """A file's text; None if it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=path, cure="move it away") from error


def _stems(run: Path) -> dict[str, set[str]]:
    """The endings of each evaluation's files, by step, attempt and exam. Other names are ignored."""
    found: dict[tuple[int, int, str], set[str]] = {}
    folder = run / FOLDER
    for name in os.listdir(folder) if folder.is_dir() else []:
        ending = next((ending for ending in ENDINGS if name.endswith(ending)), "")
        if ending and (parsed := parse_stem(name.removesuffix(ending))) is not None:
            step, exam_id, attempt = parsed
            found.setdefault((step, attempt, exam_id), set()).add(ending)
    return {stem_of(step, exam, attempt): found[step, attempt, exam] for step, attempt, exam in sorted(found)}


def _branches(run: Path) -> dict[int, int]:
    """The step from which each attempt resumed."""
    path = run / FOLDER / BRANCHES
    text = _text(path)
    if text is None:
        return {}
    try:
        return {int(attempt): int(step) for attempt, step in parse(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"not the branches of a run: {error}", where=path, cure="move it away") from error


def _abandoned(stem: str, branches: dict[int, int]) -> bool:
    """Whether a later attempt resumed from before this step."""
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    step, _, attempt = parsed
    return any(later > attempt and step > first for later, first in branches.items())


def _publish_once(target: Path, text: str) -> bool:
    """Publish a whole file under its name, unless there is one already. Whether this one was first."""
    temporary = write_beside(target, text)
    try:
        os.link(temporary, target)
        first = True
    except FileExistsError:
        first = target.samefile(temporary)  # over a network the reply to the first try can get lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        first = _rename_once(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(target.parent)
    return first


def _rename_once(temporary: Path, target: Path) -> bool:
    """Where there are no hard links: check and rename under a lock, which ends with its holder."""
    descriptor = os.open(target.parent / PUBLISHING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if target.exists():
            return False
        temporary.rename(target)
    finally:
        os.close(descriptor)
    return True


def _write_losses(run: Path, stem: str, losses: SampleLosses) -> None:
    content = {"losses": losses.losses_N.tolist(), "targets": losses.targets_N.tolist()}
    write_text(_path(run, stem, LOSSES), _json(content))


def _remove(run: Path, stem: str, *endings: str) -> None:
    for ending in endings:
        _path(run, stem, ending).unlink(missing_ok=True)


def _move_aside(path: Path, run: Path) -> list[str]:
    """Returns its name; none if it is gone already, as a request whose result was published just now."""
    try:
        shutil.move(path, path_aside(run, path.name))
    except FileNotFoundError:
        return []
    return [path.name]
