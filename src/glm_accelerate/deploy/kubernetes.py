"""A plain Indexed Job, or a TrainJob of Kubeflow with a runtime of its own; both are given the same pods.

Exit code 75 (stopped by a signal, saved) and disruptions are no failures: the pod is replaced and goes on.
Code 2 ends the job at once, all others three times a pod; the deadline ends what is interrupted for ever.
"""

from typing import Any

from glm_accelerate.deploy.deployment import GIB, PORT, WHERE, Deployment
from glm_accelerate.runtime.devices.nvidia import Nvidia
from glm_accelerate.runtime.errors import ExitCode

Manifest = dict[str, Any]

RESOURCES = {
    Nvidia.kind: "nvidia.com/gpu",
    "npu": "huawei.com/Ascend910",
    "mlu": "cambricon.com/mlu",
}
CONFIG, CACHE = "/config", "/cache"
TRIES = 2  # more, of a pod that fails
USER = 1000


def claims(deployment: Deployment) -> list[Manifest]:
    """The volumes, apart from the job: what removes it leaves them."""
    several = deployment.asked.nodes > 1 or deployment.evaluator
    asked: list[Manifest] = []
    for name, size in ((deployment.name, deployment.disk), (f"{deployment.name}-cache", deployment.disk)):
        spec = {
            "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{size // GIB}Gi"}},
        }
        asked.append(_manifest("v1", "PersistentVolumeClaim", name, spec=spec))
    return asked if deployment.asked.claim is None else asked[1:]


def job(deployment: Deployment) -> list[Manifest]:
    """An Indexed Job, whose pods meet at the first one."""
    asked, name = deployment.asked, deployment.name
    pod = _pod(deployment, deployment.train(_config_file(deployment), rendezvous=f"{name}-0.{name}:{PORT}"))
    pod["subdomain"] = name
    spec: Manifest = {
        **_tries(asked.nodes),
        "activeDeadlineSeconds": deployment.seconds,
        "template": {"metadata": _labels(deployment), "spec": pod},
    }
    found = _manifest("batch/v1", "Job", name, spec=spec)
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(deployment)["labels"],
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    made = [
        _settings(deployment),
        _network(deployment),
        _manifest("v1", "Service", name, spec=service),
        found,
    ]
    if asked.queue and asked.volcano:
        pod["schedulerName"] = "volcano"
        spec["template"]["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": name}
        group = {"minMember": asked.nodes, "queue": asked.queue}
        made.insert(0, _manifest("scheduling.volcano.sh/v1beta1", "PodGroup", name, spec=group))
    elif asked.queue:
        _queued(found, asked.queue)
    return [*made, *_evaluator(deployment)]


def kubeflow(deployment: Deployment) -> list[Manifest]:
    """A TrainJob, which gives the address of the first pod to all, and the runtime that it refers to."""
    asked, name = deployment.asked, deployment.name
    pod = _pod(deployment, deployment.train(_config_file(deployment)), container="node")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": step},
            "spec": {**_tries(), "template": {"metadata": _labels(deployment), "spec": pod}},
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": asked.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [node]}},
    }
    if asked.queue and asked.volcano:
        runtime["podGroupPolicy"] = {"volcano": {}}
    train = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": asked.nodes, "numProcPerNode": deployment.ranks},
        "activeDeadlineSeconds": deployment.seconds,
    }
    api = "trainer.kubeflow.org/v1alpha1"
    found = _manifest(api, "TrainJob", name, spec=train)
    if asked.queue and asked.volcano:
        found["metadata"]["annotations"] = {"scheduling.volcano.sh/queue-name": asked.queue}
    elif asked.queue:
        _queued(found, asked.queue)
    made = [
        _settings(deployment),
        _network(deployment),
        _manifest(api, "TrainingRuntime", name, spec=runtime),
    ]
    return [*made, found, *_evaluator(deployment)]


def _manifest(api: str, kind: str, name: str, spec: Manifest | None = None) -> Manifest:
    head: Manifest = {"apiVersion": api, "kind": kind, "metadata": {"name": name}}
    return head if spec is None else head | {"spec": spec}


def _labels(deployment: Deployment, what: str = "train") -> Manifest:
    return {"labels": {"app.kubernetes.io/name": deployment.name, "app.kubernetes.io/component": what}}


def _config_file(deployment: Deployment) -> str:
    return f"{CONFIG}/{deployment.name}.yaml"


def _settings(deployment: Deployment) -> Manifest:
    return _manifest("v1", "ConfigMap", deployment.name) | {
        "data": {f"{deployment.name}.yaml": deployment.config}
    }


def _network(deployment: Deployment) -> Manifest:
    """Nothing that listens asks for a password, so the pods of the job alone may reach each other."""
    chosen = {"matchLabels": _labels(deployment)["labels"]}
    spec = {
        "podSelector": chosen,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": chosen}]}],
    }
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", deployment.name, spec=spec)


def _tries(pods: int | None = None) -> Manifest:
    """What becomes of a job whose pods end. Kubeflow says itself how many pods there are."""
    codes = (("FailJob", ExitCode.USERS_INPUT), ("Ignore", ExitCode.STOPPED))
    rules: list[Manifest] = [
        {"action": action, "onExitCodes": {"operator": "In", "values": [int(code)]}} for action, code in codes
    ]
    rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    count = {} if pods is None else {"completions": pods, "parallelism": pods}
    return {
        "completionMode": "Indexed",
        **count,
        "backoffLimitPerIndex": TRIES,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }


def _pod(deployment: Deployment, command: list[str], container: str = "train", share: int = 1) -> Manifest:
    """`share`: as many such pods would need what a node has."""
    asked = deployment.asked
    memory = -(-deployment.memory // share // GIB)
    amounts: Manifest = {"cpu": str(max(1, deployment.cores // share)), "memory": f"{memory}Gi"}
    if deployment.kind != "cpu":
        amounts[asked.resource or RESOURCES[deployment.kind]] = str(deployment.ranks // share)
    mounts = {"runs": WHERE, "cache": CACHE, "config": CONFIG, "shared": "/dev/shm", "temporary": "/tmp"}
    hub = f"{CACHE}/huggingface"
    environment = {"GLM_ACCELERATE_CACHE": CACHE, "HF_HOME": hub, "HOME": "/tmp", "USER": "glm"}
    inside: Manifest = {
        "name": container,
        "image": asked.image,
        "command": command,
        "workingDir": WHERE,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    if asked.secret:
        inside["envFrom"] = [{"secretRef": {"name": asked.secret}}]
    rights: Manifest = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    rights["fsGroupChangePolicy"] = "OnRootMismatch"  # else all files are gone through at each start
    shared = {"medium": "Memory", "sizeLimit": f"{deployment.shared // GIB}Gi"}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": deployment.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**rights, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [inside],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": asked.claim or deployment.name}},
            {"name": "cache", "persistentVolumeClaim": {"claimName": f"{deployment.name}-cache"}},
            {"name": "config", "configMap": {"name": deployment.name}},
            {"name": "shared", "emptyDir": shared},
            {"name": "temporary", "emptyDir": {}},
        ],
    }


def _evaluator(deployment: Deployment) -> list[Manifest]:
    """A job of its own, with one device, where evaluations are not the trainer's."""
    if not deployment.evaluator:
        return []
    pod = _pod(deployment, deployment.evaluate, "evaluate", share=deployment.ranks)
    spec = {
        **_tries(1),
        "activeDeadlineSeconds": deployment.seconds,
        "template": {"metadata": _labels(deployment, "evaluate"), "spec": pod},
    }
    found = _manifest("batch/v1", "Job", f"{deployment.name}-evaluate", spec=spec)
    if deployment.asked.queue and not deployment.asked.volcano:
        _queued(found, deployment.asked.queue)
    return [found]


def _queued(found: Manifest, queue: str) -> None:
    """Kueue begins it when its queue has room for all of it."""
    found["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    found["spec"]["suspend"] = True
