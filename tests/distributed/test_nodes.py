"""Several launchers on this machine as the nodes of one job: killed, stopped, and back again."""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ranks.nodes import measure, two_machines
from glm_accelerate.checkpoint.find import published
from glm_accelerate.cli.main import main
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.launch import launch
from glm_accelerate.parallel.nodes import Terms
from glm_accelerate.parallel.seats import Several
from glm_accelerate.parallel.wire import Endpoint
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import ExitCode
from tests.processes import children_of
from tests.warm import Warm

Said = dict[str, Any]
EVERY = 5  # steps between two checkpoints
IMPATIENT = {
    "glm_accelerate.parallel.wire.QUIET": 2.0,
    "glm_accelerate.parallel.wire.LOST": 4.0,
    "glm_accelerate.parallel.launch.PARTED": 1.0,
    "glm_accelerate.parallel.nodes.LAST_CALL": 20.0,
    "glm_accelerate.parallel.nodes.RETURN": 1.0,
}


@pytest.fixture
def config(tiny_run: Said, tmp_path: Path) -> Path:
    """So that a run can be cut off at any step: a rate that does not depend on how many there are."""
    said = {
        **tiny_run,
        "adapt": {"method": "full"},
        "train": {"steps": 100_000, "step_samples": 5},
        "optim": {"learning_rate": 1e-4, "schedule": "constant", "warmup": 0},
        "precision": {"compute": "float32", "compile": "off"},
        "evaluate": {"every": 1_000_000, "where": "inline"},
        "checkpoint": {"every": EVERY, "wait": True},
    }
    del said["data"]["dev"]
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


Node = Callable[..., Warm]


@pytest.fixture
def node(config: Path, tmp_path: Path, warm: Callable[..., Warm]) -> Node:
    """node(name, nnodes, *words): `train` typed on the node of that name."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        meeting = f"127.0.0.1:{found.getsockname()[1]}"

    def do(name: str, nnodes: str, *more: str, cwd: Path | None = None) -> Warm:
        words = ["train", str(config), "--run", str(tmp_path / "run"), "--nnodes", nnodes]
        room = os.environ | {"GLM_ACCELERATE_NODE": name}
        return warm(*words, "--rendezvous", meeting, *more, cwd=cwd, env=room, group=True, other=IMPATIENT)

    return do


def steps_done(run: Path) -> int:
    """The newest step in the log, cheaply."""
    path = run / "events.jsonl"
    found = re.findall(r'"kind": "step".*?"step": (\d+)', path.read_text()) if path.exists() else []
    return int(found[-1]) if found else 0


def starts(run: Path) -> list[tuple[int, int]]:
    """(ranks, step) of each attempt."""
    path = run / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return [(event["ranks"], event["step"]) for event in events if event["kind"] in ("start", "resume")]


def await_start(run: Path, number: int, ranks: int, *nodes: Warm) -> int:
    """Until the job has begun so many times, the last time with so many ranks, and has saved a new step since
    then. The newest step.
    """
    while len(begun := starts(run)) < number or saved(run) <= begun[-1][1]:
        for one in nodes:
            assert one.poll() is None, one.err.read_text()
        time.sleep(0.05)
    assert begun[number - 1 :] == [(ranks, begun[-1][1])], begun
    return steps_done(run)


def saved(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.partition("-")[2]) for path in published(run)), default=0)


def ranks_of(launcher: int) -> list[int]:
    """The processes of a node's ranks."""
    return children_of(launcher)


def of_each_step(run: Path) -> list[dict[int, tuple[float, ...]]]:
    """The loss of each step and what it learnt from, by attempt."""
    attempts: dict[int, dict[int, tuple[float, ...]]] = {}
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "step":
            seen = tuple(float(str(event[name])) for name in ("loss", "samples", "tokens", "targets"))
            attempts.setdefault(event["attempt"], {})[event["step"]] = seen
    return list(attempts.values())


@pytest.mark.parametrize("nodes", [3, pytest.param(4, marks=pytest.mark.prove)])
def test_nodes_that_die_and_come_back(
    nodes: int, config: Path, tmp_path: Path, node: Node, go: Callable[..., str]
) -> None:
    """Nodes of a rank each. A node is killed with all that runs on it, and the launcher at the meeting point;
    of four nodes also a rank, and one is stopped and wakes up again. In the end one is asked to stop. Always
    the job goes on with the same samples in every step, and loses no more than since the last checkpoint.
    """
    run, count = tmp_path / "run", itertools.count(1)
    all_of = [node(name, f"1:{nodes}") for name in "ABCD"[:nodes]]
    host = next(one for one in all_of if "is the meeting point" in one.read_until("launcher: "))
    one, *others = (each for each in all_of if each is not host)
    await_start(run, next(count), nodes, *all_of)
    processes = ranks_of(one.pid)
    if nodes == 4:
        os.kill(processes[0], signal.SIGKILL)
        await_start(run, next(count), nodes, *all_of)
    os.killpg(others[0].pid, signal.SIGKILL)
    await_start(run, next(count), nodes - 1, host, one, *others[1:])
    others[0] = node("E", f"1:{nodes}")
    await_start(run, next(count), nodes, host, one, *others)
    if nodes == 4:
        processes += ranks_of(others[1].pid)
        os.killpg(others[1].pid, signal.SIGSTOP)
        await_start(run, next(count), 3, host, one, others[0])
        os.killpg(others[1].pid, signal.SIGCONT)
        await_start(run, next(count), 4, host, one, *others)
    host.kill()  # on one machine, another launcher can take its place
    await_start(run, next(count), nodes - 1, one, *others)
    processes += [process for each in (one, *others) for process in ranks_of(each.pid)]
    others[0].terminate()
    said = [each.communicate(timeout=60)[1] for each in (one, *others)]
    assert {each.returncode for each in (one, *others)} == {75}, said
    assert saved(run) == steps_done(run)
    assert not [process for process in processes if alive(process)]
    heard = host.err.read_text()
    ended = rf"launcher: node \w: rank \d \(process {processes[0]}\) ended by SIGKILL"
    assert bool(re.search(ended, heard)) == (nodes == 4)
    assert len(re.findall("launcher: node [A-D] is lost", heard)) == nodes - 2
    assert "this is a bug" not in "".join([heard, *said])
    attempts = of_each_step(run)
    begun = [step for _, step in starts(run)]
    for earlier, later in zip(attempts, begun[1:], strict=False):
        assert max(earlier) - later <= EVERY
    go(config, tmp_path / "one", 1, f"train.steps={steps_done(run)}")
    (alone,) = of_each_step(tmp_path / "one")
    for steps in attempts:
        for step, (loss, *samples) in steps.items():
            assert tuple(samples) == alone[step][1:]
            assert loss == pytest.approx(alone[step][0], rel=1e-4)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("there", ["nothing", "other data"])
def test_a_mistake_on_one_node_ends_all(
    there: str, config: Path, tmp_path: Path, tiny_run: Said, node: Node
) -> None:
    """With 2 and one line; the other node says where to look."""
    said = yaml.safe_load(config.read_text())
    lines = Path(tiny_run["data"]["train"]).read_text().splitlines(keepends=True)
    said["data"] |= {"train": "mine.jsonl", "cache": "cache"}
    config.write_text(yaml.safe_dump(said))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "mine.jsonl").write_text("".join(lines))
    if there == "other data":
        (elsewhere / "mine.jsonl").write_text("".join(lines[1:]))
    host = node("A", "2", cwd=tmp_path)
    host.read_until("is the meeting point")
    guest = node("B", "2", cwd=elsewhere)
    ended = host.done(), guest.done()
    heard = "".join(done.stderr for done in ended)
    assert [done.returncode for done in ended] == [2, 2], heard
    if there == "nothing":
        assert ended[1].stderr.replace("\n", "").count("error: ") == 1
        assert "mine.jsonl" in ended[1].stderr
        assert "error: " not in ended[0].stderr
        assert "launcher: node B: what is wrong is said there" in ended[0].stderr
    else:
        assert "error: rank 1 on B differs from rank 0 on A: data " in " ".join(heard.split())
        assert not (tmp_path / "run").exists()
    assert "starting again" not in heard


def one_is_slow_to_say_it(_: object) -> int:
    """Two ranks of one mistake, of which the first reports it, when the second has ended."""
    place = launched()
    assert place is not None
    if place.rank:
        return ExitCode.AFTER_ANOTHER
    time.sleep(2)
    return ExitCode.USERS_INPUT


def take_part(meeting: Endpoint, ended: "SimpleQueue[int]") -> None:
    several = Several(meeting, Terms(2, 2), {})
    ended.put(launch(one_is_slow_to_say_it, None, 1, int, ExitCode.USERS_INPUT, several=several))


def test_whoever_has_yet_to_report_a_mistake_is_left_alone() -> None:
    """Ended because of it, the others would start the job again."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        meeting = Endpoint("127.0.0.1", found.getsockname()[1])
    context = get_context("spawn")
    ended: SimpleQueue[int] = context.SimpleQueue()
    nodes = [context.Process(target=take_part, args=(meeting, ended)) for _ in range(2)]
    for each in nodes:
        each.start()
    for each in nodes:
        each.join(60)
    assert [ended.get(), ended.get()] == [ExitCode.USERS_INPUT] * 2


@pytest.mark.prove
def test_a_node_killed_while_it_saves(
    config: Path, tmp_path: Path, node: Node, go: Callable[..., str]
) -> None:
    """At any moment of a save, of either node's rank: whatever is published is whole, and the job goes on."""
    run = tmp_path / "run"
    host = node("host", "1:2")
    host.read_until("is the meeting point")
    for number in range(6):
        guest = node(f"guest-{number}", "1:2")
        await_start(run, 2 * number + 1, 2, host, guest)
        while not list((run / "checkpoints").glob(".checkpoint-*")):
            time.sleep(0.0005)
        time.sleep(0.001 * number)
        os.killpg(guest.pid, signal.SIGKILL)
        await_start(run, 2 * number + 2, 1, host)
    host.terminate()
    said = host.communicate(timeout=60)[1]
    assert host.returncode == 75, said
    assert main(["checkpoints", str(run), "verify"]) == 0
    done = steps_done(run)
    go(config, tmp_path / "one", 1, f"train.steps={done}")
    (alone,) = of_each_step(tmp_path / "one")
    for steps in of_each_step(run):
        for step, (loss, *samples) in steps.items():
            assert tuple(samples) == alone[step][1:]
            assert loss == pytest.approx(alone[step][0], rel=1e-3)


HURRIED = f"""
import sys
from glm_accelerate.cli import main
from glm_accelerate.parallel import launch, nodes, seats, wire

for name, value in {IMPATIENT!r}.items():
    module, _, constant = name.rpartition(".")
    setattr(sys.modules[module], constant, value)
launch.GPUS = ("null",)  # so that ranks begin as they do beside a GPU
sys.exit(main.main())
"""


@pytest.fixture
def network() -> Generator[tuple[str, str]]:
    """Two machines, as far as the network goes, by name; the first has 10.77.0.1, the second 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("only root makes networks")
    with ExitStack() as made:
        try:
            names = made.enter_context(two_machines())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network can be made here: {error.stderr}")
        yield names


@pytest.mark.prove
def test_fewer_bytes_cross_the_network_where_gradients_are_summed_by_node(network: tuple[str, str]) -> None:
    """Two nodes of two ranks, by their interfaces: 2 x 1/2 of the gradients, not 2 x 3/4, and headers."""
    for names, sent in ((("one", "one"), 1.5), (("one", "two"), 1.0)):
        for node in measure(network, names, 1):
            assert sent <= node["sent"] / node["gradients"] < sent + 0.05
            assert node["early"] >= 2


@pytest.mark.prove
def test_a_broken_network(
    config: Path,
    tmp_path: Path,
    network: tuple[str, str],
    spawn: Callable[..., subprocess.Popen[str]],
) -> None:
    """The side of the meeting point goes on alone, the other one ends its ranks and waits, so that never both
    train. With the network back they train together.
    """
    run = tmp_path / "run"
    words = ["train", str(config), "--run", str(run), "--nnodes", "1:2", "--rendezvous", "10.77.0.1:29500"]
    heard = [tmp_path / "host.err", tmp_path / "guest.err"]
    both: list[subprocess.Popen[str]] = []
    room = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    for name, err in zip(network, heard, strict=True):
        line = ["ip", "netns", "exec", name, sys.executable, "-c", HURRIED, *words]
        with err.open("w") as file:
            both.append(spawn(line, env=room | {"GLM_ACCELERATE_NODE": name}, stderr=file))

    def begun(ranks: int, number: int) -> None:
        while len(starts(run)) < number or saved(run) <= starts(run)[-1][1]:
            assert [one.poll() for one in both] == [None, None], [err.read_text() for err in heard]
            time.sleep(0.05)
        assert starts(run)[number - 1][0] == ranks

    begun(2, 1)
    listened = {line.split()[3] for line in sockets(network[0]) if line.startswith("LISTEN")}
    assert listened
    assert {address.rpartition(":")[0] for address in listened} == {"10.77.0.1"}
    subprocess.run(["ip", "-n", network[0], "link", "set", "glm0", "down"], check=True)
    begun(1, 2)
    assert "no launcher answers at 10.77.0.1:29500 yet" in heard[1].read_text()
    left = [Path(f"/proc/{process}/cmdline").read_bytes() for process in ranks_of(both[1].pid)]
    assert not [line for line in left if b"spawn_main" in line]
    subprocess.run(["ip", "-n", network[0], "link", "set", "glm0", "up"], check=True)
    begun(2, 3)
    both[1].send_signal(signal.SIGTERM)
    assert [one.wait(60) for one in both] == [75, 75], [err.read_text() for err in heard]


def sockets(name: str) -> list[str]:
    """Those of TCP in a network, as `ss` lists them."""
    listed = subprocess.run(
        ["ip", "netns", "exec", name, "ss", "-Htln"], check=True, capture_output=True, text=True
    )
    return listed.stdout.splitlines()
