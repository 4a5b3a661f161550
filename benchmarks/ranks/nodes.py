"""What crosses the network between nodes in a step of whole copies, counted at its interface.

python -m benchmarks.ranks.nodes [--steps 4] [--out DIR]      as root: two network namespaces are the nodes

Two ranks on each of two nodes take the trainer's own steps; gradients are summed by one ring over all ranks
(the nodes have one name) and by node. Only bytes are compared: all of it is one machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import origin, page, publish, table
from glm_accelerate.data.types import Batch, Step
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import joined
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.training.step import forward_backward_of, train_step

SIZES = Sizes(4096, 512, 1408, 8, 8, 2, 64, 1e-5, 1e4, 32, True, 512)
COUNTERS = Path("/sys/class/net/glm0/statistics")
ADDRESS = "10.77.0.{}"
LOCAL = 2  # ranks of a node
ABOUT = """\
**sent**: what left a node, TCP/IP headers included, for each byte of gradients. **begun early**: sums that
were begun before the last backward pass had made its last gradient, of all in a step. A ring over 4 ranks
sends 2 x 3/4 over each node's link, two nodes that sum by node 2 x 1/2.
"""


@contextmanager
def two_machines() -> Generator[tuple[str, str]]:
    """Two machines, as far as the network goes, by name; the first has 10.77.0.1, the second 10.77.0.2."""
    names = f"glm-{os.getpid()}-a", f"glm-{os.getpid()}-b"

    def ip(words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words.split()], check=check, capture_output=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add glm0 netns {names[0]} type veth peer name glm0 netns {names[1]}")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add {ADDRESS.format(number)}/24 dev glm0")
            ip(f"-n {name} link set glm0 up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            ip(f"netns delete {name}", check=False)


def one_rank(steps: int) -> None:
    """Prints what this node has sent in all steps after the first, and what the last one's trace shows."""
    torch.manual_seed(0)
    model = Decoder(SIZES, Origin("glm4", {}, ""))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    bind_operators(model.train())
    with joined() as ranks:
        place = Place(ranks, Axes(data=ranks.count))
        weights = dict(model.named_parameters())
        mover = mover_of(torch.optim.SGD(weights.values(), lr=0.0), CutTable(weights, place), clip=1.0)
        passes = forward_backward_of(model, torch.device("cpu"), place)
        tokens = np.arange(64)[None] + ranks.rank
        batch = Batch(tokens, tokens, ((64,),), 1, 64, 64)
        step = Step(1, 0, (batch, batch), (), 128 * ranks.count, 128 * ranks.count)
        train_step(passes, mover, step, 0.0, place=place)
        dist.barrier()
        before = int((COUNTERS / "tx_bytes").read_text())
        for _ in range(steps):
            train_step(passes, mover, step, 0.0, place=place)
        dist.barrier()
        sent = int((COUNTERS / "tx_bytes").read_text()) - before
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train_step(passes, mover, step, 0.0, place=place)
        events = [(event.name, event.time_range.start) for event in trace.events() or ()]
        by_node = len(set(ranks.nodes)) > 1
        kind = "c10d::reduce_scatter_" if by_node else "c10d::allreduce_"
        begun = sorted(at for name, at in events if name == kind)
        begun = begun if by_node else begun[:-1]  # the last one sums the loss
        last = max(at for name, at in events if name.endswith("AccumulateGrad"))
        size = sum(weight.nbytes for weight in weights.values())
        early = sum(at < last for at in begun)
        found = {
            "rank": ranks.rank,
            "sent": sent / steps,
            "gradients": size,
            "early": early,
            "all": len(begun),
        }
        sys.stdout.write(json.dumps(found))


def measure(machines: Sequence[str], names: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Of the first rank of each node; `names`: what the nodes are called."""
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(LOCAL * len(machines)):
        node, local = divmod(rank, LOCAL)
        said = {
            "RANK": rank,
            "WORLD_SIZE": LOCAL * len(machines),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": LOCAL,
            "MASTER_ADDR": ADDRESS.format(1),
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "glm0",
            "GLM_ACCELERATE_NODE": names[node],
            "OMP_NUM_THREADS": 1,
        }
        line = ["ip", "netns", "exec", machines[node], sys.executable, "-m", "benchmarks.ranks.nodes"]
        environment = os.environ | {name: str(value) for name, value in said.items()}
        line += ["--rank", "--steps", str(steps)]
        ranks.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [one.communicate()[0] for one in ranks]
    if any(one.returncode for one in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(answer) for answer in answers[::LOCAL]]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Bytes between nodes in a step.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    given = parser.parse_args(words)
    if given.rank:
        one_rank(given.steps)
        return
    source = origin(["python", "-m", "benchmarks.ranks.nodes", *words], {"torch": torch.__version__})
    with two_machines() as machines:
        ways = {"one ring": ("one", "one"), "by node": ("one", "two")}
        found = {way: measure(machines, names, given.steps) for way, names in ways.items()}
    rows = [
        (
            way,
            node,
            f"{each['gradients'] / 1e6:,.1f}",
            f"{each['sent'] / 1e6:,.1f}",
            f"{each['sent'] / each['gradients']:.3f}",
            f"{each['early']:.0f} of {each['all']:.0f}",
        )
        for way, nodes in found.items()
        for node, each in enumerate(nodes, 1)
    ]
    ring, nodes = (sum(each["sent"] for each in found[way]) for way in ways)
    headings = "summed, node, MB of gradients, MB sent a step, sent for each byte, begun early"
    fact = (
        f"2 nodes of {LOCAL} ranks, {given.steps} steps of two passes; by node {nodes / ring:.3f} of one ring"
    )
    text = page("Bytes between nodes", source, [fact], ABOUT, table(headings.split(", "), rows))
    publish(given.out, "ranks-nodes", source, text, found)


if __name__ == "__main__":
    main(sys.argv[1:])
