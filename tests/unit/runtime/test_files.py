"""Folders that only their owner can write or read, whatever the umask; shared ones on purpose only."""

import os
import stat
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from glm_accelerate.runtime.files import close_folder, is_ours, make_folder, open_private, private_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, Path]]:
    """The places of a cache, under a umask that hides nothing."""
    found = {name: tmp_path / name for name in ("lab", "home", "tmp")}
    monkeypatch.setenv("GLM_ACCELERATE_CACHE", str(found["lab"]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found["home"]))
    monkeypatch.setattr(tempfile, "tempdir", str(found["tmp"]))
    before = os.umask(0)
    yield found
    os.umask(before)


def test_a_new_one_is_ours_alone(places: dict[str, Path]) -> None:
    folder = private_folder("inductor", "key")
    assert folder == places["lab"] / "inductor" / "key"
    assert [mode(level) for level in (folder, folder.parent, places["lab"])] == [0o700] * 3


@pytest.mark.parametrize("opened", ["root", "folder", "above"])
def test_one_that_others_can_write_is_not_used(places: dict[str, Path], opened: str) -> None:
    folder = private_folder("native")
    {"root": places["lab"], "folder": folder, "above": places["lab"].parent}[opened].chmod(0o775)
    if opened != "above":
        assert private_folder("native") == places["home"] / "glm-accelerate" / "native"
        (places["home"] / "glm-accelerate").chmod(0o770)
        assert private_folder("native") == places["tmp"] / f"glm-accelerate-{os.geteuid()}" / "native"
        places["tmp"].chmod(0o1777)  # as /tmp is: nobody can put another folder in its place
        assert private_folder("native").is_relative_to(places["tmp"])
        places["tmp"].chmod(0o777)
    with pytest.raises(PermissionError, match=r"no private folder \(.*(: others can write there.*){3}"):
        private_folder("native")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_one_of_another_user_is_not_used(places: dict[str, Path]) -> None:
    folder = private_folder("native")
    library = folder / "planted.so"
    library.touch(0o644)
    assert is_ours(library)
    os.chown(library, 12345, 12345)
    assert not is_ours(library)
    os.chown(folder, 12345, 12345)
    assert private_folder("native").is_relative_to(places["home"])


def test_a_link_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/bin/sh")
    assert not is_ours(tmp_path / "link")


def test_what_we_make_is_private_and_a_group_has_what_was_given_to_it(places: dict[str, Path]) -> None:
    def file_in(folder: Path) -> Path:
        make_folder(folder)
        with open_private(folder / "file", "wb"):
            return folder / "file"

    alone = file_in(places["home"] / "data")
    places["lab"].mkdir()
    places["lab"].chmod(0o2775)  # chmod g+ws
    os.umask(0o022)
    shared = file_in(places["lab"] / "data" / "key")

    assert [mode(path) for path in (alone, alone.parent, places["home"])] == [0o600, 0o700, 0o700]
    assert [mode(path) & 0o777 for path in (shared, shared.parent)] == [0o660, 0o770]
    close_folder(shared.parent)
    assert mode(shared.parent) & 0o777 == 0o770
    alone.parent.chmod(0o755)  # an earlier version's
    close_folder(alone.parent)
    assert mode(alone.parent) == 0o700


def test_no_link_is_followed_and_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"), open_private(tmp_path / "lock", "wb"):
        pass
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_where_nobody_can_make_folders_the_place_is_named() -> None:
    with pytest.raises(PermissionError, match="no folder can be made there: '/proc/none'"):
        make_folder(Path("/proc/none/cache"))
