"""What `deploy` writes, read by the validators of those who will read it: none of them needs a network."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from glm_accelerate.cli.deploy import CLUSTER
from glm_accelerate.cli.main import main

Said = dict[str, Any]
Write = Callable[..., Path]
VERSIONS = ("1.29", "1.33", "1.37")  # of Kubernetes: the first with tries for each index, and the newest
# Six jobs: of each kind of device, on one node and on several; and what is asked of clusters for them.
JOBS: dict[str, tuple[str, str, Said]] = {
    "one processor": ("--hours 2", "", {}),
    "one card": ("--gpu H20", "--secret hub", {}),
    "evaluated beside": ("--gpu H100 --gpus 2", "", {"where": "external"}),
    "two nodes": ("--gpu A100 --gpus 4 --nodes 2", "--queue team", {}),
    "Ascend": ("--gpu 910B --gpus 4 --nodes 2", "--queue q --volcano", {}),
    "MLU": ("--gpu MLU590 --gpus 2 --nodes 2 --hours 9", "--claim mine", {}),
}


@pytest.fixture
def write(tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(kind, job): the folder with what was written for it."""
    monkeypatch.chdir(tmp_path)

    def do(kind: str, job: str, *more: str) -> Path:
        devices, cluster, changes = JOBS[job]
        words = [*devices.split(), *(cluster.split() if kind in CLUSTER else [])]
        said = tiny_run | {"evaluate": tiny_run["evaluate"] | changes}
        Path("My run.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
        assert main(["deploy", kind, "My run.yaml", *words, *more, "--out", kind]) == 0
        return tmp_path / kind

    return do


def manifests(folder: Path) -> list[Said]:
    return [
        each
        for name in ("claims.yaml", "job.yaml")
        for each in yaml.safe_load_all((folder / name).read_text())
    ]


def of_kind(folder: Path, kind: str) -> Said:
    return next(each for each in manifests(folder) if each["kind"] == kind)


def pod_of(job: Said) -> Said:
    return job["spec"]["template"]["spec"]


def check(manifest: Said) -> None:
    """By Kubernetes' own schemas, with unknown keys refused; Kubeflow's models drop those without a word."""
    group, kind = manifest["apiVersion"].partition("/")[0], manifest["kind"]
    if group == "trainer.kubeflow.org":
        model = getattr(models, f"TrainerV1alpha1{kind}")
        assert model.from_dict(deepcopy(manifest)).to_dict() == manifest
    elif group == "scheduling.volcano.sh":
        assert set(manifest["spec"]) == {"minMember", "queue"}
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed for this system")
    return found


@pytest.mark.parametrize("kind", CLUSTER)
@pytest.mark.parametrize("job", JOBS)
def test_manifests_are_what_clusters_accept(write: Write, kind: str, job: str) -> None:
    for manifest in manifests(write(kind, job)):
        check(manifest)


def test_a_broken_manifest_is_refused(write: Write) -> None:
    """A letter that is missing, a key of an older API, and one of Kubeflow's."""
    job = of_kind(write("k8s", "two nodes"), "Job")
    for break_it in (
        lambda spec: spec["template"]["spec"].update(terminationGracePeriodSecond=30),
        lambda spec: spec.update(backofLimitPerIndex=spec.pop("backoffLimitPerIndex")),
        lambda spec: spec["template"]["spec"].update(serviceAccountToken=False),
        lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=["75"]),
    ):
        broken = deepcopy(job)
        break_it(broken["spec"])
        with pytest.raises(kubernetes_validate.ValidationError):
            check(broken)
    train = of_kind(write("kubeflow", "two nodes"), "TrainJob")
    for name, value in (("podSpecOverrides", []), ("numNode", 2)):
        broken = deepcopy(train)
        broken["spec"][name] = value
        with pytest.raises((AssertionError, ValueError)):
            check(broken)


@pytest.mark.parametrize("kind", CLUSTER)
def test_what_a_signal_ended_is_no_failure_and_nothing_goes_on_for_ever(write: Write, kind: str) -> None:
    folder = write(kind, "two nodes")
    job = of_kind(folder, "Job" if kind == "k8s" else "TrainingRuntime")["spec"]
    bounded = job if kind == "k8s" else of_kind(folder, "TrainJob")["spec"]
    assert 3600 < bounded["activeDeadlineSeconds"] < 2 * 3600
    if kind == "kubeflow":
        (replicated,) = job["template"]["spec"]["replicatedJobs"]
        assert replicated["name"] == "node"
        job = replicated["template"]["spec"]

    def answer(code: int, disrupted: bool = False) -> str:
        """What Kubernetes does with a pod: the first rule that matches."""
        for rule in job["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {"values": []})
            conditions = {each["type"] for each in rule.get("onPodConditions", []) if disrupted}
            if code in codes["values"] or "DisruptionTarget" in conditions:
                return rule["action"]
        return "Count"

    assert [answer(code) for code in (75, 2, 1, 137)] == ["Ignore", "FailJob", "Count", "Count"]
    assert answer(137, disrupted=True) == "Ignore"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # without it no such rule is allowed
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert (job["completionMode"], job["maxFailedIndexes"]) == ("Indexed", 0)
    assert 0 < job["backoffLimitPerIndex"] < 5


def test_pods_are_told_what_the_plan_knows(write: Write) -> None:
    folder = write("k8s", "two nodes")
    job, service = of_kind(folder, "Job"), of_kind(folder, "Service")
    (inside,) = pod_of(job)["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    words = inside["command"]
    assert words[:5] == ["glm-accelerate", "train", "/config/my-run.yaml", "--run", "/data/runs/My run"]
    assert words[5:] == ["--nproc", "2", "--nnodes", "2", "--rendezvous", "my-run-0.my-run:29500"]
    assert pod_of(job)["subdomain"] == service["metadata"]["name"] == "my-run"
    assert inside["resources"]["limits"] == inside["resources"]["requests"]
    assert inside["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    config = yaml.safe_load(of_kind(folder, "ConfigMap")["data"]["my-run.yaml"])
    assert (config["model"]["path"], config["data"]["train"][0]["path"]) == (
        "/data/model",
        "/data/train.jsonl",
    )
    mounts = {mount["mountPath"] for mount in inside["volumeMounts"]}
    assert {"/data", "/cache", "/config", "/dev/shm", "/tmp"} == mounts
    assert pod_of(job)["securityContext"]["runAsNonRoot"] is True


def test_what_is_asked_for_is_given(write: Write) -> None:
    (inside,) = pod_of(of_kind(write("k8s", "one card"), "Job"))["containers"]
    assert inside["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "--nnodes" not in inside["command"]
    beside = [each for each in manifests(write("k8s", "evaluated beside")) if each["kind"] == "Job"]
    assert [each["metadata"]["name"] for each in beside] == ["my-run", "my-run-evaluate"]
    assert [pod_of(each)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for each in beside] == [
        "2",
        "1",
    ]
    ascend = write("k8s", "Ascend")
    assert pod_of(of_kind(ascend, "Job"))["schedulerName"] == "volcano"
    assert of_kind(ascend, "PodGroup")["spec"] == {"minMember": 2, "queue": "q"}
    limits = pod_of(of_kind(ascend, "Job"))["containers"][0]["resources"]["limits"]
    assert limits["huawei.com/Ascend910"] == "2"
    mlu = write("k8s", "MLU", "--resource", "cambricon.com/mlu590")
    limits = pod_of(of_kind(mlu, "Job"))["containers"][0]["resources"]["limits"]
    assert limits["cambricon.com/mlu590"] == "1"
    assert of_kind(mlu, "Job")["spec"]["activeDeadlineSeconds"] == 9 * 3600
    assert pod_of(of_kind(mlu, "Job"))["volumes"][0]["persistentVolumeClaim"]["claimName"] == "mine"
    assert [each["metadata"]["name"] for each in manifests(mlu) if "Claim" in each["kind"]] == [
        "my-run-cache"
    ]


def test_what_the_job_would_not_see_is_refused(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("k8s", "one card")
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    config = str(tmp_path / "My run.yaml")
    assert main(["deploy", "k8s", config, "--gpu", "RTX 4090"]) == 2
    assert "is not below this directory, which is all that the job sees, as /data" in capsys.readouterr().err
    assert main(["deploy", "k8s", config, "--gpu", "24GiB"]) == 2
    assert "how long it takes is not known (--hours N" in capsys.readouterr().err
    assert main(["deploy", "slurm", config, "--secret", "hub"]) == 2
    assert "--secret is for compose, k8s, kubeflow" in capsys.readouterr().err
    assert main(["deploy", "k8s", config, "--volcano"]) == 2
    assert "(--queue default)" in capsys.readouterr().err
    assert not list(inner.rglob("*.yaml"))


def shellcheck(path: Path) -> int:
    return subprocess.run([tool("shellcheck"), "--severity=style", path], check=False).returncode


@pytest.mark.parametrize("job", JOBS)
def test_scripts_of_slurm_are_sound(write: Write, job: str) -> None:
    folder = write("slurm", job, "--queue", "night")
    text = (folder / "train.sh").read_text()
    assert (folder / "evaluate.sh").exists() == (job == "evaluated beside")
    for path in folder.glob("*.sh"):
        assert shellcheck(path) == 0
    assert re.search(r"^#SBATCH --signal=USR1@\d+\n#SBATCH --requeue$", text, re.MULTILINE)
    assert "\n#SBATCH --partition=night\n" in text
    assert ("--rendezvous" in text) == ("--nnodes 1:2" in text) == ("#SBATCH --nodes=2" in text)
    (folder / "broken.sh").write_text(text.replace("$code", "$cod"))
    assert shellcheck(folder / "broken.sh") == 1


@pytest.mark.process
def test_slurm_queues_again_what_gets_on_and_nothing_for_ever(write: Write, tmp_path: Path) -> None:
    """The script as bash runs it, with commands of Slurm and of ours that end as they may."""
    script, commands = write("slurm", "one card") / "train.sh", tmp_path / "commands"
    commands.mkdir()
    newest = tmp_path / "runs/My run/checkpoints/latest"
    newest.parent.mkdir(parents=True)

    def ends(code: int, saves: str, restarts: int = 9) -> tuple[int, bool]:
        """Its exit code, and whether it is queued again."""
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        newest.write_text("checkpoint-5")
        for name, text in (("srun", f"echo {saves} > '{newest}'; exit {code}"), ("scontrol", f"> '{asked}'")):
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        room = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "SLURM_JOB_ID": "1",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        ended = subprocess.run(["bash", script], env=room, check=False, capture_output=True).returncode
        return ended, asked.exists()

    assert ends(75, "checkpoint-9") == (75, True)
    assert ends(75, "checkpoint-5") == (75, False)
    assert ends(75, "checkpoint-5", restarts=0) == (75, True)
    assert [ends(code, "checkpoint-9") for code in (0, 1, 2)] == [(0, False), (1, False), (2, False)]


def test_the_image(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    dockerfile = write("docker", "one card") / "Dockerfile"
    said = capsys.readouterr().out
    assert "docker build --build-arg BASE=pytorch/pytorch:" in said
    command = [tool("hadolint"), "--failure-threshold", "warning"]
    assert subprocess.run([*command, dockerfile], check=False).returncode == 0
    text = dockerfile.read_text()
    for broken in (text.replace("USER 1000:1000", ""), text.replace("HEALTHCHECK", "HEALTHCHEK")):
        dockerfile.write_text(broken)
        assert subprocess.run([*command, dockerfile], check=False, capture_output=True).returncode == 1
    write("docker", "one processor", "--base", "python@sha256:0")
    assert "BASE=python@sha256:0" in capsys.readouterr().out


def test_services_of_compose(write: Write) -> None:
    """There is no schema of compose to be had without a network: its keys are those of its specification."""
    folder = write("compose", "evaluated beside")
    said = yaml.safe_load((folder / "compose.yaml").read_text())
    known = {"image", "build", "init", "user", "working_dir", "restart", "stop_grace_period", "shm_size",
             "mem_limit", "cpus", "read_only", "tmpfs", "cap_drop", "security_opt", "volumes", "deploy",
             "command", "entrypoint", "depends_on", "env_file"}  # fmt: skip
    assert set(said["services"]) == {"train", "evaluate"}
    for service in said["services"].values():
        assert set(service) <= known
    train = said["services"]["train"]
    assert train["restart"] == "on-failure:3"
    assert train["command"][:2] == ["train", "/config.yaml"]
    assert (folder / "my-run.yaml").is_file()
    assert (folder / "Dockerfile").is_file()
    (device,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 2
