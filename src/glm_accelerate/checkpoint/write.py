"""Writing one rank's share of a checkpoint and publishing it: one plain function, whoever runs it."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.files import PieceEntry, Source, Written, write_files
from glm_accelerate.checkpoint.format import (
    STATE,
    File,
    Manifest,
    Stored,
    parse_tensors,
    require_whole,
    seal,
)
from glm_accelerate.checkpoint.meeting import Meeting, SaveFailed
from glm_accelerate.checkpoint.publish import LATEST
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import sync, write_synced, write_text

MARGIN = 1 << 20  # bytes for the manifest and the directory, besides what each tensor takes there
MARGIN_PER_PART = 512


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save, as a rank's writer needs to know it besides the tensors."""

    meeting: Meeting
    run_id: str
    codec: str
    state: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]


def write(job: SaveJob, parts: Sequence[PieceEntry], source: Source) -> int:
    """Write this rank's files and see the checkpoint published; the first rank publishes. Returns bytes:
    the first rank's are those of the whole checkpoint, the others' their own. Leaves nothing if it fails.
    """
    meeting = job.meeting
    target, directory, rank = meeting.target, meeting.directory, meeting.rank
    try:
        meeting.begin()
        _require_space(directory, parts)
        written = write_files(directory, parts, source, rank=rank, ranks=meeting.ranks, codec=job.codec)
        if rank:
            meeting.report(asdict(written))
            meeting.await_publication()
            return sum(file.bytes for file in written.files.values())
        manifest = _merge(job, written)
        for name, content in seal(manifest).items():
            write_synced(directory / name, content)
        sync(directory)
        directory.rename(target)  # from here on it is a checkpoint
        return settle(meeting, manifest)
    except SaveFailed as error:
        meeting.give_up(str(error))
        raise
    except (OSError, UserError) as error:
        reason = f"cannot be written: {error}"
        meeting.give_up(reason)
        raise SaveFailed(reason) from error
    except BaseException as error:
        meeting.give_up(repr(error))
        raise


def settle(meeting: Meeting, manifest: Manifest) -> int:
    """Let the pointer name what was published, if it is fit to go on from. Returns its bytes."""
    target = meeting.target
    sync(target.parent)
    if meeting.kind == "checkpoint" and not manifest.facts.get("nonfinite"):
        write_text(target.with_name(LATEST), target.name + "\n")
    return sum(file.bytes for file in manifest.files.values())


def _require_space(directory: Path, parts: Sequence[PieceEntry]) -> None:
    """Refuse to begin what cannot end. (With a codec it needs less, but how much is not known.)"""
    need = MARGIN + sum(part.bytes + MARGIN_PER_PART for part in parts)
    have = shutil.disk_usage(directory).free
    if have < need:
        raise SaveFailed(f"no room: needs {need:,} bytes, {have:,} are free")


def _merge(job: SaveJob, mine: Written) -> Manifest:
    """What all ranks wrote as one manifest."""
    state = json.dumps(job.state, indent=2, allow_nan=False).encode()
    write_synced(job.meeting.directory / STATE, state)
    files = {STATE: File(len(state), hashlib.sha256(state).hexdigest()), **mine.files}
    shares, finite = [mine.tensors], mine.finite
    for note in job.meeting.gather():
        files.update({name: File(**entry) for name, entry in note["files"].items()})
        shares.append(parse_tensors(note["tensors"]))
        finite = finite and note["finite"]
    groups: dict[str, dict[str, Stored]] = {}
    for share in shares:
        for group, entries in share.items():
            whole = groups.setdefault(group, {})
            for name, stored in entries.items():
                before = whole.get(name, Stored(stored.dtype, stored.shape, ()))
                if (before.dtype, before.shape) != (stored.dtype, stored.shape):
                    raise SaveFailed(f"the ranks disagree on what {name} is")
                whole[name] = Stored(stored.dtype, stored.shape, (*before.pieces, *stored.pieces))
    for entries in groups.values():
        for name, stored in entries.items():
            require_whole(stored, name)
    return Manifest(
        step=job.meeting.step,
        attempt=job.meeting.attempt,
        files=files,
        fingerprints=job.fingerprints,
        facts={**job.facts, **({} if finite else {"nonfinite": True})},
        run=job.run_id,
        ranks=job.meeting.ranks,
        codec=job.codec,
        tensors=groups,
    )
