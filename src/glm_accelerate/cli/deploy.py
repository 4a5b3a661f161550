"""`deploy KIND CONFIG`: files that run a config on a cluster or in containers, by what its plan foretells."""

import argparse
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.cli import plan as planning
from glm_accelerate.runtime.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from glm_accelerate.deploy.deployment import Deployment

HELP = (
    "Write the files that run a config in containers or on a cluster. Memory, /dev/shm, disk and time in "
    "them are the plan's. Stopped or preempted the run saves, and goes on; it never loops for ever."
)
CONTAINERS, CLUSTER = ("docker", "compose"), ("k8s", "kubeflow")
KINDS = (*CONTAINERS, *CLUSTER, "slurm")
FOR = {"base": CONTAINERS, "claim": CLUSTER, "volcano": CLUSTER, "secret": ("compose", *CLUSTER),
       "queue": (*CLUSTER, "slurm"), "resource": (*CLUSTER, "slurm")}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="for what")
    planning.device_arguments(parser)
    parser.add_argument(
        "--out", type=options.directory, metavar="DIR", help="where the files go (deploy/<the config's name>)"
    )
    parser.add_argument(
        "--image", default="glm-accelerate:latest", metavar="NAME", help="in which it runs (%(default)s)"
    )
    parser.add_argument("--base", metavar="IMAGE", help="of the image, if it is built here")
    parser.add_argument(
        "--hours", type=options.number(above_zero=True), metavar="N", help="after which it ends (by the plan)"
    )
    parser.add_argument(
        "--resource", metavar="NAME", help="what the cluster calls the device, if not as usual"
    )
    parser.add_argument("--claim", metavar="NAME", help="a volume claim that is there, for data and runs")
    parser.add_argument(
        "--secret",
        metavar="NAME",
        help="a secret (a file, in containers) of environment variables, as HF_TOKEN",
    )
    parser.add_argument("--queue", metavar="NAME", help="of Kueue or Volcano; a partition of Slurm")
    parser.add_argument("--volcano", action="store_true", help="the queue is Volcano's")


def run(args: argparse.Namespace) -> int:
    """Plan, write, and say what to do next."""
    for name, kinds in FOR.items():
        if getattr(args, name) and args.kind not in kinds:
            raise UserError(f"--{name} is for {', '.join(kinds)}")
    if args.volcano and not args.queue:
        raise UserError("--volcano says whose --queue it is", cure="--queue default")
    config = options.config_from(args)  # its mistakes are shown before torch is loaded

    from glm_accelerate.deploy.deployment import WHERE, Asked, deployment_of
    from glm_accelerate.models.locate import locate
    from glm_accelerate.plan.weigh import require_host, require_room

    found = planning.foretell(args, config, None)
    require_room(found.weighed)
    require_host(found.weighed, found.ground.hardware)
    model = locate(config.model.path)
    files = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    asked = Asked(
        args.nodes,
        args.gpus,
        args.image,
        args.hours,
        args.resource,
        args.secret,
        args.queue,
        args.volcano,
        args.claim,
    )
    deployment = deployment_of(
        config,
        options.config_name(args),
        asked,
        found.ground.hardware,
        (found.plan, found.weighed.memory, found.taken.seconds, files),
        home=None if args.kind == "slurm" else PurePosixPath(WHERE),
    )
    folder: Path = args.out or Path("deploy") / options.config_name(args)
    folder.mkdir(parents=True, exist_ok=True)
    files, then = _files(args, deployment, folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    out = [*deployment.reasons, f"wrote {', '.join(files)} in {folder}"]
    if args.kind in CLUSTER:
        out.append(f"the volume has to hold as {WHERE} what the config names below {Path.cwd()}")
    sys.stdout.write("\n".join([*out, *then]) + "\n")
    return ExitCode.DONE


def _files(
    args: argparse.Namespace, deployment: "Deployment", folder: Path
) -> "tuple[Mapping[str, str], Sequence[str]]":
    """What is written, and what to type then."""
    from glm_accelerate.deploy import containers, kubernetes, slurm
    from glm_accelerate.plan.weigh import quoted

    config = {f"{deployment.name}.yaml": deployment.config}
    if args.kind in CLUSTER:
        made = kubernetes.job(deployment) if args.kind == "k8s" else kubernetes.kubeflow(deployment)
        files = {"claims.yaml": kubernetes.claims(deployment), "job.yaml": made}
        said = "".join(f"# {reason}\n" for reason in deployment.reasons)
        texts = {name: said + _documents(each) for name, each in files.items() if each}
        return texts, [f"kubectl apply -f {folder}"]
    if args.kind == "slurm":
        scripts = {"train.sh": slurm.script(deployment, str((folder / f"{deployment.name}.yaml").resolve()))}
        if deployment.evaluator:
            scripts["evaluate.sh"] = slurm.evaluator(deployment)
        return scripts | config, [f"sbatch {folder / name}" for name in scripts]
    texts = {"Dockerfile": containers.dockerfile(), ".dockerignore": "*\n!Dockerfile\n!*.whl\n"} | config
    if args.kind == "docker":
        said = containers.build_arguments(deployment, args.base).items()
        words = [word for name, value in said for word in ("--build-arg", f"{name}={value}")]
        return texts, [" ".join(["docker build", *map(quoted, words), "--tag", args.image, str(folder)])]
    texts["compose.yaml"] = _documents([containers.compose(deployment, args.base)])
    return texts, [f"docker compose -f {folder / 'compose.yaml'} up --build"]


def _documents(manifests: "Sequence[Mapping[str, object]]") -> str:
    from glm_accelerate.config.strict_yaml import write_document

    return "---\n".join(write_document(dict(each)) for each in manifests)
