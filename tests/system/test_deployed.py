"""The Job that `deploy k8s` writes, as its pods would run it: each a process 1 of its own, without root, with
a network, a host's name and a file system in which nothing but the Job's volumes can be written.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ranks.nodes import ADDRESS, two_machines
from glm_accelerate.checkpoint.find import published
from glm_accelerate.cli.main import main
from glm_accelerate.observe.events import read_events

Said = dict[str, Any]
ROOT = Path(__file__).parents[2]
STEPS = 240
# What a kubelet does: volumes where the pod has them, the rest as it is, and the command as process 1.
POD = """
set -eu
root=$1 volumes=$2 name=$3 python=$4 venv=$5 source=$6; shift 6
mount --make-rprivate /
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ] && [ "$path" != /tmp ] && [ "$path" != /proc ] && [ "$path" != /root ]; then
        mkdir "$root$path"; mount --rbind "$path" "$root$path"
    fi
done
for path in "$python" "$venv" "$source"; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
for path in data cache config tmp proc; do mkdir -p "$root/$path"; done
for path in data cache config; do mount --bind "$volumes/$path" "$root/$path"; done
mount -t tmpfs -o mode=1777 none "$root/tmp"
mount -t tmpfs -o mode=1777 none "$root/dev/shm"
mount -t proc none "$root/proc"
mount --bind "$volumes/hosts" "$root/etc/hosts"
hostname "$name"
exec chroot "$root" setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set=-all --no-new-privs \
    env -i --chdir=/data "$@"
"""


@pytest.fixture
def network() -> Generator[tuple[str, str]]:
    with ExitStack() as made:
        try:
            names = made.enter_context(two_machines())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network can be made here: {error}")
        yield names


@pytest.fixture
def job(tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """The Job of two nodes with a rank each, and its volumes in `volumes`."""
    monkeypatch.chdir(tmp_path)
    tiny_run |= {"train": {"steps": STEPS, "step_samples": 4}, "checkpoint": {"every": 40}}
    tiny_run["evaluate"] |= {"every": 60, "where": "inline"}
    Path("my.yaml").write_text(yaml.safe_dump(tiny_run))
    assert main(["deploy", "k8s", "my.yaml", "--gpus", "2", "--nodes", "2", "--hours", "1"]) == 0
    made = {each["kind"]: each for each in yaml.safe_load_all(Path("deploy/my/job.yaml").read_text())}
    for volumes in ("calm", "disturbed"):
        for name in ("data", "cache", "config"):
            (tmp_path / volumes / name).mkdir(parents=True)
        for name in ("model", "train.jsonl", "dev.jsonl"):
            copy = shutil.copytree if name == "model" else shutil.copy
            copy(tmp_path / name, tmp_path / volumes / "data" / name)
        for name, text in made["ConfigMap"]["data"].items():
            (tmp_path / volumes / "config" / name).write_text(text)
        hosts = [f"{ADDRESS.format(number + 1)} my-{number}.my my-{number}" for number in range(2)]
        (tmp_path / volumes / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        subprocess.run(["chown", "-R", "1000:1000", tmp_path / volumes], check=True)
    return made["Job"]["spec"]


class Pod:
    """One pod of the Job."""

    def __init__(self, job: Said, index: int, network: str, volumes: Path, spawn: Callable[..., Any]) -> None:
        (inside,) = job["template"]["spec"]["containers"]
        root = volumes / f"root-{index}"
        root.mkdir(exist_ok=True)
        room = [f"{each['name']}={each['value']}" for each in inside["env"]]
        room += [f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", f"JOB_COMPLETION_INDEX={index}"]
        room.append("CUDA_VISIBLE_DEVICES=")
        line = ["ip", "netns", "exec", network, "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork",
                "--kill-child", "sh", "-c", POD, "pod", str(root), str(volumes), f"my-{index}",
                sys.base_prefix, sys.prefix, str(ROOT)]  # fmt: skip
        self.log = volumes / f"log-{index}"
        with self.log.open("a") as file:
            self.process = spawn([*line, *room, *inside["command"]], stdout=file, stderr=file)

    def terminate(self) -> None:
        """SIGTERM to process 1 alone, as a kubelet does."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        os.kill(int(listed.read_text()), signal.SIGTERM)

    def ended(self) -> int:
        return self.process.wait(timeout=120)


def steps_of(run: Path) -> int:
    """The newest step in the log."""
    path = run / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return max((event["step"] for event in events if event["kind"] == "step"), default=0)


@pytest.mark.prove
def test_two_pods_preempted_twice_end_with_the_weights_of_two_that_were_left_alone(
    job: Said, network: tuple[str, str], tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("no pod can be made here: unshare and setpriv are missing")

    def start(volumes: str) -> list[Pod]:
        return [Pod(job, index, network[index], tmp_path / volumes, spawn) for index in range(2)]

    def said(volumes: str) -> str:
        return "".join((tmp_path / volumes / f"log-{index}").read_text() for index in range(2))

    run = tmp_path / "disturbed/data/runs/my"
    for victim, step in ((1, 50), (0, 130)):
        pods = start("disturbed")
        while steps_of(run) < step:
            assert [pod.process.poll() for pod in pods] == [None, None], said("disturbed")
            time.sleep(0.02)
        pods[victim].terminate()
        assert [pod.ended() for pod in pods] == [75, 75], said("disturbed")
        assert step <= steps_of(run) < STEPS
    assert [pod.ended() for pod in start("disturbed")] == [0, 0], said("disturbed")
    assert [pod.ended() for pod in start("calm")] == [0, 0], said("calm")
    attempts = {event["attempt"] for event in read_events(run / "events.jsonl")}
    assert len(attempts) == 3
    ends = [published(tmp_path / volumes / "data/runs/my")[0] for volumes in ("calm", "disturbed")]
    assert [end.name for end in ends] == [f"checkpoint-{STEPS}"] * 2
    weights = [{file.name: file.read_bytes() for file in end.rglob("*.safetensors")} for end in ends]
    assert weights[0]
    assert weights[0] == weights[1]
