"""Evaluations as files that any process may ask, claim and answer, on any machine that sees the run.

ask -> claim (a lock that ends with its holder) -> publish once (the first answer stays, others are dropped)
What an earlier attempt did beyond the step from which a later one went on is never listed: `branches.json`.
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

from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.checkpoint.retain import place_aside
from glm_accelerate.data.strict_json import parse
from glm_accelerate.evaluate.protocol.messages import (
    FOLDER,
    SNAPSHOTS,
    EvaluationResult,
    Findings,
    Request,
    parse_request,
    parse_result,
    parse_stem,
    sound,
)
from glm_accelerate.evaluate.statistics.decide import Status
from glm_accelerate.evaluate.statistics.intervals import Items
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import sync, write_beside, write_text
from glm_accelerate.runtime.folders import make_folder

ASKED, CLAIM, RESULT = ".asked.json", ".claim", ".json"
ITEMS, PREDICTIONS = ".items.json", ".predictions.jsonl"
ENDINGS = (ASKED, CLAIM, ITEMS, PREDICTIONS, RESULT)  # the longest first, where one ends as another
BRANCHES, PUBLISHING = "branches.json", ".publishing"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a run's folder holds, by step and attempt, and what was passed over, and why."""

    waiting: list[Request]
    results: list[EvaluationResult]
    passed_over: list[str]


def ask(run: Path, request: Request) -> None:
    """Leave a request. What has been answered is not asked again."""
    folder = run / FOLDER
    make_folder(folder)
    if not _path(run, request.stem, RESULT).exists():
        write_text(_path(run, request.stem, ASKED), _json(asdict(request)))


def waiting(run: Path) -> list[Request]:
    """What is asked and not answered, by step. A file that cannot be read costs itself, never the others."""
    return listing(run, answered=False).waiting


def results(run: Path) -> list[EvaluationResult]:
    """What was answered, by step and attempt."""
    return listing(run).results


def listing(run: Path, *, answered: bool = True) -> Listing:
    """All that is there, and why some of it cannot be read. Without `answered` no result is read."""
    requests: list[Request] = []
    found: list[EvaluationResult] = []
    passed_over: list[str] = []
    given_up = _branches(run)
    for stem, endings in _stems(run).items():
        try:
            if _given_up(stem, given_up):
                continue
            if RESULT in endings:
                result = read(run, stem) if answered else None
                found += [] if result is None else [result]
            elif ASKED in endings:
                asked = _read_request(run, stem)
                requests += [] if asked is None else [asked]
        except UserError as error:
            passed_over.append(f"passed over: {error}")
    requests.sort(key=lambda request: (request.step, request.attempt, request.plan))
    found.sort(key=lambda result: (result.step, result.attempt, result.plan))
    return Listing(requests, found, sorted(passed_over))


def read(run: Path, stem: str) -> EvaluationResult | None:
    """One result; None as long as there is none."""
    path = _path(run, stem, RESULT)
    text = _text(path)
    return None if text is None else parse_result(text, path)


def read_items(run: Path, stem: str) -> Items | None:
    """What was measured of each sample; None unless that evaluation is done and measured something."""
    result, path = read(run, stem), _path(run, stem, ITEMS)
    text = None if result is None or result.status != "done" else _text(path)
    if text is None:
        return None
    try:
        said = parse(text)
        losses, targets = (np.asarray(said[name], np.float64) for name in ("losses", "targets"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not the items of a result: {error}", where=path, cure="move it away") from error
    if losses.ndim != 1 or losses.shape != targets.shape:
        raise UserError("losses and targets differ in number", where=path, cure="move it away")
    return Items(losses, targets)


@contextmanager
def claim(run: Path, request: Request) -> Generator[bool]:
    """Whether it is ours to answer. The lock ends with the process, however that ends."""
    path, asked = _path(run, request.stem, CLAIM), _path(run, request.stem, ASKED)
    if not asked.exists():
        yield False
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # Somebody may have answered it, or given its branch up, since it was seen to wait.
        if _path(run, request.stem, RESULT).exists() or not asked.exists():
            path.unlink(missing_ok=True)
            yield False
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield True
    finally:
        os.close(descriptor)


def is_claimed(run: Path, request: Request) -> bool:
    """Whether somebody is at it now."""
    try:
        descriptor = os.open(_path(run, request.stem, CLAIM), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def publish(run: Path, findings: Findings) -> bool:
    """Whether this is the answer that stays: another may have been there first, or the branch be given up.

    What belongs to a result is there before it.
    """
    result = sound(findings.result)
    folder = run / FOLDER
    make_folder(folder)
    if _given_up(result.stem, _branches(run)):
        return False
    target = _path(run, result.stem, RESULT)
    if target.exists():
        return False
    if findings.items is not None and result.status == "done":
        _write_items(run, result.stem, findings.items)
    if findings.predictions:
        lines = (json.dumps(asdict(said), ensure_ascii=False) + "\n" for said in findings.predictions)
        write_text(_path(run, result.stem, PREDICTIONS), "".join(lines))
    first = _publish_once(target, _json(asdict(result)))
    if first and findings.extended is not None and result.against is not None:
        _extend(run, result.against.stem, findings.extended)
    if not first and (stays := read(run, result.stem)) is not None and stays.status != "done":
        _remove(run, result.stem, ITEMS, PREDICTIONS)  # who was first has measured nothing
    _remove(run, result.stem, ASKED, CLAIM)
    return first


def withdraw(run: Path, request: Request, status: Status, reason: str) -> bool:
    """Answer a request with why it is not done. Whether that stays: a result may be there already."""
    return publish(
        run, Findings(EvaluationResult(request.step, request.plan, request.attempt, status, reason=reason))
    )


def abandon_after(run: Path, step: int, attempt: int) -> list[str]:
    """Attempt `attempt` goes on from `step`: what earlier ones asked, found and left beyond it moves aside.

    Somebody may be evaluating some of that now; what comes of it is dropped, as `branches.json` tells them.
    """
    folder, moved = run / FOLDER, list[str]()
    if folder.is_dir():
        branches = {**_branches(run), attempt: step}
        write_text(folder / BRANCHES, _json({str(number): first for number, first in branches.items()}))
        for stem, endings in sorted(_stems(run).items()):
            if _given_up(stem, {attempt: step}):
                _remove(run, stem, CLAIM)
                for ending in endings - {CLAIM}:
                    moved += _move_aside(_path(run, stem, ending), run)
    snapshots = run / SNAPSHOTS
    for path in sorted(snapshots.iterdir()) if snapshots.is_dir() else []:
        number = step_of(path.name, "snapshot")
        if number is not None and number > step:
            moved += _move_aside(path, run)
    sweep(run)
    return moved


def sweep(run: Path) -> None:
    """Remove what killed evaluators left of evaluations that are answered: temporary files, claims, requests.

    What still waits may be at work elsewhere, and stays.
    """
    for stem, endings in _stems(run).items():
        if RESULT in endings:
            _remove(run, stem, ASKED, CLAIM)
            for leftover in (run / FOLDER).glob(f".{stem}.*"):
                leftover.unlink(missing_ok=True)


def _path(run: Path, stem: str, ending: str) -> Path:
    return run / FOLDER / f"{stem}{ending}"


def _json(said: Mapping[str, object]) -> str:
    return json.dumps(said, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


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


def _read_request(run: Path, stem: str) -> Request | None:
    path = _path(run, stem, ASKED)
    text = _text(path)  # None: answered since the folder was listed
    return None if text is None else parse_request(text, path)


def _stems(run: Path) -> dict[str, set[str]]:
    """What is there of each evaluation. Other names are nobody's and stay unseen."""
    found: dict[str, set[str]] = {}
    folder = run / FOLDER
    for name in os.listdir(folder) if folder.is_dir() else []:
        ending = next((ending for ending in ENDINGS if name.endswith(ending)), None)
        if ending is not None and parse_stem(stem := name.removesuffix(ending)) is not None:
            found.setdefault(stem, set()).add(ending)
    return found


def _branches(run: Path) -> dict[int, int]:
    """From which step each attempt went on."""
    path = run / FOLDER / BRANCHES
    text = _text(path)
    if text is None:
        return {}
    try:
        return {int(attempt): int(step) for attempt, step in parse(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"not the branches of a run: {error}", where=path, cure="move it away") from error


def _given_up(stem: str, branches: dict[int, int]) -> bool:
    """Whether a later attempt went on from before this step."""
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    step, _, attempt = parsed
    return any(later > attempt and step > first for later, first in branches.items())


def _publish_once(target: Path, text: str) -> bool:
    """Give a file its name, whole and on disk, unless another has it."""
    temporary = write_beside(target, text)
    try:
        first = _name_once(temporary, target)
        sync(target.parent)
        return first
    finally:
        temporary.unlink(missing_ok=True)


def _name_once(temporary: Path, target: Path) -> bool:
    try:
        os.link(temporary, target)
    except FileExistsError:
        return target.samefile(temporary)  # over a network the first word of success can get lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # No hard links here: look and rename, one after another. The lock ends with its holder.
        descriptor = os.open(target.parent / PUBLISHING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if target.exists():
                return False
            temporary.rename(target)
        finally:
            os.close(descriptor)
    return True


def _write_items(run: Path, stem: str, items: Items) -> None:
    said = {"losses": items.losses_N.tolist(), "targets": items.targets_N.tolist()}
    write_text(_path(run, stem, ITEMS), _json(said))


def _extend(run: Path, stem: str, items: Items) -> None:
    """More samples of an earlier evaluation: those that follow the ones that are there."""
    before = read_items(run, stem)
    if before is not None and len(before.losses_N) < len(items.losses_N):
        _write_items(run, stem, items)


def _remove(run: Path, stem: str, *endings: str) -> None:
    for ending in endings:
        _path(run, stem, ending).unlink(missing_ok=True)


def _move_aside(path: Path, run: Path) -> list[str]:
    """Its name; none if it is gone already, as a request whose answer was published just now."""
    try:
        shutil.move(path, place_aside(run, path.name))
    except FileNotFoundError:
        return []
    return [path.name]
