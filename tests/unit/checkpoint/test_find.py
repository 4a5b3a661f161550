"""What is chosen, whatever lies there; and that an explicit path is opened without looking around."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.find import candidates, check, published, resolve_path
from glm_accelerate.checkpoint.format import Damaged, Manifest, seal
from glm_accelerate.runtime.errors import UserError
from tests.checkpoints import save


def make(run: Path, step: int, **facts: object) -> Path:
    weights = {"a": torch.full((4, 3), float(step))}
    return save(
        run, step, 1, weights=weights, optimizer={}, state={"position": step}, fingerprints={}, facts=facts
    ).path


def test_oddly_named_neighbours_are_summed_up_in_one_line(tmp_path: Path) -> None:
    names = ["checkpoint-", "checkpoint-abc", "checkpoint-10-tmp", "checkpoint--5", "checkpoint-1e3"]
    names += ["Checkpoint-7", "tmp-checkpoint-5", "checkpoint-10.bak", "checkpoint-٣", "checkpoint-1\n"]
    names += ["checkpoint-007", "checkpoint-" + "9" * 200]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-99999").write_text("a file")
    (tmp_path / "checkpoints" / "checkpoint-99998").symlink_to(tmp_path)
    made = [make(tmp_path, step) for step in (10_000, 9000)]
    (tmp_path / "checkpoints" / "latest").write_text("checkpoint-10000\n")
    found = candidates(tmp_path)
    assert found.paths == made
    assert len(found.reasons) == 1
    assert "14 entries are no checkpoints by name or kind, as 'Checkpoint-7'" in found.reasons[0]
    for name in names:
        with pytest.raises(UserError, match="not a whole checkpoint"):
            check(tmp_path / "checkpoints" / name)


def test_what_is_not_whole_is_passed_over_by_name(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in range(1, 8)]
    os.truncate(paths[6] / "weights-0-of-1.safetensors", 100)
    (paths[5] / "state.json").unlink()
    (paths[4] / "manifest.json").unlink()
    (paths[3] / "manifest.sha256").write_text("0\n")
    shutil.rmtree(paths[2])
    paths[1].rename(paths[2])  # its manifest says 2
    found = candidates(tmp_path)
    assert found.paths == [paths[0]]
    wanted = ["weights-0-of-1", "state.json", "manifest.json", "does not match", "name says step 3"]
    assert len(found.reasons) == 6
    assert all(word in reason for word, reason in zip(wanted, found.reasons, strict=False))
    assert "names checkpoint-7; checkpoint-1 is the newest that is whole" in found.reasons[-1]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00\xfe", b"../../etc\n", b"checkpoint-3/..\n", b"checkpoint-03\n", b"x" * 9999],
)
def test_an_odd_pointer_is_ignored_with_its_reason(content: bytes, tmp_path: Path) -> None:
    newest = make(tmp_path, 3)
    (tmp_path / "checkpoints" / "latest").write_bytes(content)
    found = candidates(tmp_path)
    assert found.paths == [newest]
    assert "latest: does not hold a checkpoint's name; checkpoint-3 is the newest" in found.reasons[0]


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "missing", "stale"])
def test_the_newest_good_one_wins_over_the_pointer(kind: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    newest = make(tmp_path, 9)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("checkpoint-9\n")
    if kind == "directory":
        pointer.mkdir()
    elif kind == "link":
        pointer.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(pointer)
    elif kind == "stale":
        pointer.write_text("checkpoint-3\n")
    found = candidates(tmp_path)
    assert [path.name for path in found.paths] == ["checkpoint-9", "checkpoint-3"]
    assert found.paths[0] == newest
    assert len(found.reasons) == 1
    assert str(pointer) in found.reasons[0]


def test_weights_that_are_not_finite_are_not_gone_on_from(tmp_path: Path) -> None:
    good = make(tmp_path, 1)
    make(tmp_path, 2, nonfinite=True)
    found = candidates(tmp_path)
    assert found.paths == [good]
    assert "not finite" in found.reasons[0]


def test_a_newer_schema_is_no_damage(tmp_path: Path) -> None:
    """An older one must not be taken in its place."""
    make(tmp_path, 1)
    path = make(tmp_path, 2)
    for name, content in seal(Manifest(2, 1, {}, {}, schema=99)).items():
        (path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"newer version \(schema 99") as caught:
        candidates(tmp_path)
    assert not isinstance(caught.value, Damaged)


def test_a_hundred_thousand_siblings(tmp_path: Path) -> None:
    newest = make(tmp_path, 1_000_000)
    folder = os.open(newest.parent, os.O_RDONLY)
    for step in range(100_000):
        os.mkdir(f"checkpoint-{step}", dir_fd=folder)
    os.close(folder)
    assert candidates(tmp_path).paths[0] == newest


def test_nothing_here(tmp_path: Path) -> None:
    assert candidates(tmp_path).paths == published(tmp_path) == []
    with pytest.raises(UserError, match="no checkpoint here"):
        resolve_path(tmp_path)


OPEN = """
import sys
from pathlib import Path
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.training.directory import choose_start
run, path = map(Path, sys.argv[1:])
(chosen,) = choose_start(run, str(path)).paths
reader = Reader(chosen)
print(reader.state(), reader.group("weights")["a"].sum().item())
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_an_explicit_path_lists_no_directory(tmp_path: Path) -> None:
    """The kernel says so."""
    path = make(tmp_path, 7)
    for step in range(3):
        make(tmp_path, step)

    log = tmp_path / "log"
    traced = ["strace", "-f", "-y", "-e", "trace=getdents64", "-o", str(log)]
    words = [*traced, sys.executable, "-c", OPEN, str(tmp_path), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.stdout == "{'position': 7} 84.0\n", done.stderr
    listed = log.read_text()
    assert "getdents64" in listed  # of Python's own directories: the trace works
    assert str(tmp_path) not in listed


def test_without_a_right_to_list(tmp_path: Path) -> None:
    """As another user, if this one is root, to whom modes mean nothing."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    path = make(tmp_path / "run", 7)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for folder in (path, *path.parents):
                if folder.is_relative_to(tmp_path):
                    folder.chmod(0o711)
            for file in path.iterdir():
                file.chmod(0o644)
            os.chdir(path)
            os.setuid(65534)
            from glm_accelerate.checkpoint.read import Reader

            with pytest.raises(PermissionError):
                os.listdir("..")
            code = 0 if Reader(Path("../checkpoint-7")).state() == {"position": 7} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
