"""Any single bit that flips and any end that is cut off, in any file of a real checkpoint: `checkpoints RUN
verify` answers with 2 and names that file alone. Checkpoints of 1 and 2 ranks, with and without zstd.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import DIGEST, MANIFEST, STATE, read_manifest
from glm_accelerate.cli.main import main
from tests.warm import Warm

Said = dict[str, Any]
CODECS = ("none", "zstd")
SHARE_OF_FLIPS = 0.7
COMMAND = [sys.executable, "-m", "glm_accelerate.cli.main"]


@dataclass(frozen=True)
class Damage:
    """A bit of a byte that flips; without one, everything from that byte on is gone."""

    file: Path
    place: int
    bit: int | None

    def of(self, content: bytes) -> bytes:
        if self.bit is None:
            return content[: self.place]
        flipped = bytes([content[self.place] ^ 1 << self.bit])
        return content[: self.place] + flipped + content[self.place + 1 :]


def damages(checkpoints: Sequence[Path], times: int) -> Iterator[Damage]:
    """Spread evenly over all files: most bytes are weights, and most of what is read is not."""
    draw = random.Random(7)
    files = [file for path in checkpoints for file in sorted(path.iterdir())]
    for number in range(times):
        file = files[number % len(files)]
        flip = draw.random() < SHARE_OF_FLIPS
        yield Damage(file, draw.randrange(file.stat().st_size), draw.randrange(8) if flip else None)


def make(said: Said, folder: Path, ranks: int, warm: Callable[..., Warm]) -> list[Path]:
    """A run of two steps with each codec; its last checkpoint."""
    made = []
    for codec in CODECS:
        said["checkpoint"] = {"every": 1, "codec": codec}
        said["parallel"] = {"shard": "full"}  # so that each rank has files of its own
        (folder / "damage.yaml").write_text(yaml.safe_dump(said))
        run = folder / f"{ranks}-{codec}"
        line = ["train", str(folder / "damage.yaml"), "--run", str(run), "--nproc", str(ranks)]
        answer = warm(*line, "train.steps=2").done()
        assert answer.returncode == 0, answer.stderr
        path = published(run)[0]
        manifest = read_manifest(path)
        assert (manifest.schema, manifest.ranks, manifest.codec) == (2, ranks, codec)
        names = {file.name for file in path.iterdir()}
        assert {MANIFEST, DIGEST, STATE} < names
        assert len(names) == 3 + 2 * ranks
        made.append(path)
    return made


def require_named(damage: Damage, code: int, said: str) -> None:
    assert code == 2, (damage, said)
    verdicts = said.replace("\n", "").partition("damaged  ")[2].partition("whole  ")[0]
    named = {file.name for file in damage.file.parent.iterdir() if file.name in verdicts}
    # A digest that does not match speaks for two files: nothing says which of them is as it was.
    assert named == ({MANIFEST, DIGEST} if damage.file.name in (MANIFEST, DIGEST) else {damage.file.name}), (
        said
    )


def find_all(checkpoints: Sequence[Path], times: int, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for damage in damages(checkpoints, times):
        whole = damage.file.read_bytes()
        damage.file.write_bytes(damage.of(whole))
        code = main(["checkpoints", str(damage.file.parent), "verify"])
        require_named(damage, code, capsys.readouterr().out)
        damage.file.write_bytes(whole)
    for path in checkpoints:
        assert main(["checkpoints", str(path), "verify"]) == 0


def find_by_command(checkpoints: Sequence[Path], times: int) -> None:
    """In a process of its own, and by the run's directory: a whole checkpoint lies beside the damaged one."""
    for damage in damages(checkpoints, times):
        whole = damage.file.read_bytes()
        damage.file.write_bytes(damage.of(whole))
        line = [*COMMAND, "checkpoints", str(damage.file.parents[2]), "verify"]
        answer = subprocess.run(line, check=False, capture_output=True, text=True)
        require_named(damage, answer.returncode, answer.stdout)
        assert answer.stdout.count("whole  ") == 1
        damage.file.write_bytes(whole)


def test_damage_is_found_and_named(
    tiny_run: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: Callable[..., Warm]
) -> None:
    checkpoints = make(tiny_run, tmp_path, 1, warm)
    find_all(checkpoints, 100, capsys)
    find_by_command(checkpoints, 1)


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_every_one_of_1000(
    tiny_run: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: Callable[..., Warm]
) -> None:
    checkpoints = [*make(tiny_run, tmp_path, 1, warm), *make(tiny_run, tmp_path, 2, warm)]
    find_all(checkpoints, 1000, capsys)
    find_by_command(checkpoints, 10)
