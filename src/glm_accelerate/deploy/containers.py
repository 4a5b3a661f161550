"""An image, and containers of it on one machine by compose."""

import os
import re
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glm_accelerate.deploy.deployment import WHERE, Deployment
from glm_accelerate.runtime.devices.nvidia import Nvidia
from glm_accelerate.runtime.errors import UserError

CONFIG, CACHE = "/config.yaml", "/cache"
TRIES, USER = 3, 1000


def dockerfile() -> str:
    """It knows nothing of a run."""
    return (resources.files("glm_accelerate.deploy") / "Dockerfile").read_text(encoding="utf-8")


def compose(deployment: Deployment, base: str | None) -> dict[str, Any]:
    """Training as a service; who stops them ends them for good, and what fails is tried again a few times."""
    _require_one(deployment)
    asked = deployment.asked
    service: dict[str, Any] = {
        "image": asked.image,
        "init": True,
        "user": f"{os.getuid() or USER}:{os.getgid() or USER}",  # who owns this directory
        "working_dir": WHERE,
        "restart": f"on-failure:{TRIES}",
        "stop_grace_period": f"{deployment.grace}s",
        "shm_size": deployment.shared,
        "mem_limit": deployment.memory,
        "cpus": deployment.cores,
        "read_only": True,
        "tmpfs": ["/tmp:exec"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": [f"{Path.cwd()}:{WHERE}", f"./{deployment.name}.yaml:{CONFIG}:ro", f"cache:{CACHE}"],
    }
    if asked.secret:
        service["env_file"] = [asked.secret]
    train = service | _cards(deployment, deployment.ranks) | {"command": deployment.train(CONFIG)[1:]}
    train["build"] = {"context": ".", "args": build_arguments(deployment, base)}
    services = {"train": train}
    if deployment.evaluator:
        words = [word.replace("$", "$$") for word in deployment.evaluate]
        services["evaluate"] = (
            service | _cards(deployment, 1) | {"entrypoint": words[:1], "command": words[1:]}
        )
        services["evaluate"]["depends_on"] = ["train"]
    return {"name": deployment.name, "services": services, "volumes": {"cache": {}}}


def _require_one(deployment: Deployment) -> None:
    if deployment.asked.nodes > 1:
        raise UserError("containers of one machine are one node", cure="deploy k8s, kubeflow or slurm")
    if deployment.kind not in ("cpu", Nvidia.kind):
        raise UserError(
            f"how containers here get a device `{deployment.kind}` is not known", cure="deploy k8s"
        )


def build_arguments(deployment: Deployment, base: str | None) -> dict[str, str]:
    usual = re.search(rf"^# base {deployment.kind}: (\S+)$", dockerfile(), re.MULTILINE)
    if base is None and usual is None:
        raise UserError(
            f"no image is known to build on for a device `{deployment.kind}`", cure="--base IMAGE"
        )
    return {
        "BASE": base or (usual[1] if usual else ""),
        "PACKAGE": f"glm-accelerate=={version('glm-accelerate')}",
    }


def _cards(deployment: Deployment, count: int) -> dict[str, Any]:
    if deployment.kind == "cpu":
        return {}
    device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
