"""A script for sbatch: one launcher a node, a signal before the end, and again in the queue after it."""

from glm_accelerate.deploy.deployment import PORT, Deployment
from glm_accelerate.plan.weigh import quoted
from glm_accelerate.runtime.devices.nvidia import Nvidia
from glm_accelerate.runtime.errors import ExitCode

GENERIC = {Nvidia.kind: "gpu", "npu": "npu", "mlu": "mlu"}  # resources as --gres calls them
STARTS = 3  # that may save nothing, as those that are cut off while the model is loaded


def script(deployment: Deployment, config: str) -> str:
    """Queued again after code 75 as long as each start saves something new: it never loops for ever."""
    asked, more = deployment.asked, deployment.asked.nodes > 1
    where = """
# The address by which the other nodes reach the first one: its name may mean 127.0.1.1 on itself.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | awk '{print $1}')
"""
    # Slurm gives no node in place of one that fails: the others go on without it.
    words = deployment.train(config, f"1:{asked.nodes}", "MEETING")
    command = " ".join(map(quoted, words)).replace("MEETING", f'"$address:{PORT}"')
    newest = f"cat {quoted(deployment.run + '/checkpoints/latest')} 2>/dev/null"
    return f"""\
{_head(deployment, deployment.name, asked.nodes, deployment.ranks)}\
#SBATCH --signal=USR1@{deployment.grace}
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
set -u
cd {quoted(str(deployment.home))} || exit {ExitCode.USERS_INPUT}
before=$({newest})
{where if more else ""}
srun --cpus-per-task={deployment.cores} --no-kill --kill-on-bad-exit=0 {command}
code=$?
after=$({newest})
if [ "$code" -eq {ExitCode.STOPPED} ]; then  # stopped, with everything saved
    if [ "$after" != "$before" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {STARTS} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "not queued again: this start was too short to save anything new" >&2
    fi
fi
exit "$code"
"""


def evaluator(deployment: Deployment) -> str:
    """A job of one device that answers the run's evaluations."""
    head = _head(deployment, f"{deployment.name}-evaluate", 1, 1)
    command = " ".join(map(quoted, deployment.evaluate))
    return f"{head}set -u\nexec {command}\n"


def _head(deployment: Deployment, name: str, nodes: int, ranks: int) -> str:
    hours, minutes = divmod(deployment.once // 60, 60)
    asked = deployment.asked
    cards = asked.resource or GENERIC.get(deployment.kind)
    said = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": deployment.cores,
        "mem": f"{deployment.memory >> 20}M",
        "time": f"{hours}:{minutes:02}:00",
        "gres": cards and f"{cards}:{ranks}",
        "partition": asked.queue,
    }
    lines = "".join(f"#SBATCH --{key}={value}\n" for key, value in said.items() if value)
    reasons = "".join(f"# {reason}\n" for reason in deployment.reasons)
    return f"#!/bin/bash\n{reasons}{lines}"
