"""Files that appear whole or not at all (written beside their place, synced, renamed), and who may use them.

What is believed unread (compiled code, digests) lies where nobody else can write. Prepared data belong to
their owner alone, whatever the umask, unless their folder was given to a group on purpose.
"""

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from glm_accelerate.runtime import env


def write_synced(path: Path, content: bytes) -> None:
    """A new file that is on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def write_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Replace a small file in one piece. `synced`: it has to survive a power loss."""
    temporary = write_beside(path, text, synced=synced)
    try:
        temporary.replace(path)
        if synced:
            sync(path.parent)
    except BaseException as error:
        _give_up(temporary, path, error)
        raise


def write_beside(path: Path, text: str, *, synced: bool = True) -> Path:
    """A temporary file in the folder of `path`, to be renamed to it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if synced:
                os.fsync(descriptor)
    except BaseException as error:
        _give_up(temporary, path, error)
        raise
    return temporary


def sync(path: Path) -> None:
    """Make a file or a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(*parts: str) -> Path:
    """A folder of our cache, made if it is missing, to which only this user and root can have written.

    GLM_ACCELERATE_CACHE comes first, then the user's own cache, then one in the system's temporary folder.
    PermissionError names the fault of each where none will do.
    """
    refused: list[str] = []
    for root in env.private_roots():
        try:
            root = root.resolve()
            _require_unwritable(root)
            for level in (root, *(root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))):
                make_folder(level)
                if not is_ours(level):
                    raise PermissionError(errno.EACCES, "others can write there", str(level))
            return root.joinpath(*parts)
        except OSError as error:
            refused.append(f"{error.filename or root}: {error.strerror}")
    raise PermissionError(errno.EACCES, f"no private folder ({'; '.join(refused)})")


def is_ours(path: Path) -> bool:
    """Whether nobody but this user and root can have written there."""
    status = path.lstat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents: for this user alone, or for the group of a shared folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # another process was faster
    except FileNotFoundError as error:  # beside what is there: a file system that lets nobody make anything
        raise PermissionError(errno.EACCES, "no folder can be made there", str(folder)) from error
    if is_shared(folder.parent):
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG)


def close_folder(folder: Path) -> None:
    """Let nobody else look into a folder that is ours and not shared: earlier versions left it open."""
    with suppress(OSError):  # it may be missing, or on a disk that is only read
        if folder.stat().st_uid == os.geteuid() and not is_shared(folder):
            folder.chmod(0o700)


def is_shared(folder: Path) -> bool:
    """Whether a folder was given to a group on purpose, by `chmod g+ws`."""
    both = stat.S_ISGID | stat.S_IWGRP
    return folder.stat().st_mode & both == both


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether an open file is locked now, for as long as it stays open. Never waits."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_private(path: Path, mode: Literal["wb", "ab"]) -> IO[bytes]:
    """Open a file that, if it is new, is ours alone, or our group's in a shared folder. Follows no link."""
    return open(path, mode, opener=_private)


def _give_up(temporary: Path, path: Path, error: BaseException) -> None:
    temporary.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
        error.filename = str(path)


def _private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    if is_shared(Path(path).parent) and os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o660)
    return descriptor


def _require_unwritable(root: Path) -> None:
    """Whoever can write in a parent of a folder can put another one in its place."""
    for level in root.parents:
        mode = level.stat().st_mode if level.exists() else 0
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise PermissionError(errno.EACCES, "others can write there", str(level))


def absolute_path(path: str) -> str:
    """The same file from any directory."""
    return str(Path(os.path.expanduser(path)).absolute())


def local_name(model: str) -> str:
    """A model's directory as an absolute path; a hub's name as it is."""
    return absolute_path(model) if os.path.isdir(os.path.expanduser(model)) else model
