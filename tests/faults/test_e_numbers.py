"""E. Numbers that are not as they should be. See README.md for the other cases."""

import hashlib
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml

from glm_accelerate.assemble.tensors import WholeTensors
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import read_manifest
from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.pipeline import collate
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import Mover, mover_of
from glm_accelerate.parallel.place import SINGLE, Axes, Place
from glm_accelerate.parallel.ranks import joined
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.training.state import restore, resume_tensors
from glm_accelerate.training.step import WholeModel, train_step

CPU = torch.device("cpu")
LEARNING_RATE = 1e-2


def model_of(path: Path, place: Place = SINGLE) -> tuple[Decoder, Mover]:
    model = load_model(path).train()
    adapt(model, AdaptSection(method="full"))
    optimizer = build_optimizer(model.named_parameters(), OptimSection())
    return model, mover_of(optimizer, CutTable(dict(model.named_parameters()), place), clip=1.0)


def step_of(learnt: bool = True) -> Step:
    """Two samples of ten tokens, with something to learn in them or not."""
    tokens = np.arange(20, 30, dtype=np.int32)
    samples = [Sample(tokens + at, np.full(10, learnt), FilePlace("made", at)) for at in range(2)]
    batches = tuple(collate(arrangement, samples) for arrangement in ARRANGE["pack"]([10, 10], 64))
    return Step(1, 0, batches, (0, 1), 20, sum(batch.targets for batch in batches))


def weights_of(model: Decoder) -> str:
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def one_rank(path: Path, poisoned: int) -> list[dict[str, object]]:
    """Three steps, in the second of which one rank's gradient is infinite; what each of them did."""
    told: list[dict[str, object]] = []
    with joined() as ranks:
        place = Place(ranks, Axes(data=ranks.count))
        model, mover = model_of(path, place)
        weight = model.layers[0].mlp.down_proj.weight
        for number in (1, 2, 3):
            poison = number == 2 and ranks.rank == poisoned
            hook = weight.register_hook(
                lambda gradient, poison=poison: gradient * (torch.inf if poison else 1)
            )
            done = train_step(WholeModel(model, CPU, place), mover, step_of(), LEARNING_RATE, place=place)
            hook.remove()
            told.append({"applied": done.applied, "weights": weights_of(model)})
    return told


def test_e2_an_infinite_gradient_on_one_rank_only(trainer, spawn) -> None:
    """No rank applies that step, all apply the others, and they stay equal to the last bit."""
    model = yaml.safe_load(trainer.config.read_text())["model"]["path"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    line = ["env", *(f"{name}={value}" for name, value in place.items())]
    jobs = [
        spawn(
            [*line, f"RANK={rank}", sys.executable, __file__, model, "1"], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    first, second = (json.loads(job.communicate(timeout=120)[0]) for job in jobs)
    assert [said["applied"] for said in first] == [True, False, True]
    assert first == second
    assert first[0]["weights"] == first[1]["weights"] != first[2]["weights"]


def test_e5_a_step_in_which_nothing_is_learnt(trainer) -> None:
    """Zero by zero is no NaN: the loss is 0, and nothing moves."""
    path = Path(yaml.safe_load(trainer.config.read_text())["model"]["path"])
    model, mover = model_of(path)
    nothing = step_of(learnt=False)
    assert nothing.targets == 0
    before = weights_of(model)
    for step in (nothing, replace(nothing, batches=())):
        done = train_step(WholeModel(model, CPU), mover, step, LEARNING_RATE)
        assert (done.loss, done.grad_norm, done.applied) == (0.0, 0.0, False)
    assert weights_of(model) == before
    assert train_step(WholeModel(model, CPU), mover, step_of(), LEARNING_RATE).applied


def test_e6_a_spike_of_the_loss(trainer, holds, shell, warned, tmp_path: Path) -> None:
    """Told, marked in what is saved from then on, and the last checkpoint before it stays, though only the
    newest was to be kept. Nobody is rolled back unasked; who asks finds it.
    """
    run = tmp_path / "run"
    words = ["adapt.method=full", "optim.schedule=constant", "optim.warmup=0"]
    words += ["checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=0"]
    assert trainer.train(run, *words, "train.steps=8").code == 0
    poisoned = trainer.train(run, *words, "train.steps=16", "optim.learning_rate=3", "--accept-changes")
    assert poisoned.code == 0, poisoned
    said = re.search(
        r"the loss jumped from about (\S+) to (\S+) at step (\d+): checkpoints are suspect", warned(run)
    )
    assert said is not None
    assert float(said[2]) > 3 * float(said[1])
    jumped = int(said[3])
    newest, good = published(run)
    assert newest.name == "checkpoint-16"
    assert read_manifest(newest).facts["suspect"] == jumped
    assert 8 <= int(good.name.partition("-")[2]) < jumped - 1
    assert "suspect" not in read_manifest(good).facts
    seen = {one["step"]: one["suspect"] for one in json.loads(shell("checkpoints", str(run), "--json").out)}
    assert seen == {16: jumped, int(good.name.partition("-")[2]): None}
    assert "suspect" in shell("checkpoints", str(run)).out
    assert "deleted: nothing" in shell("checkpoints", str(run), "prune").out
    assert holds(run) == newest
    back = ["train.steps=16", "--accept-changes", "--resume", good.name.partition("-")[2]]
    assert trainer.train(run, *words, *back).code == 0
    assert "suspect" not in read_manifest(holds(run)).facts
    assert [path.name for path in published(run)] == ["checkpoint-16"]


def test_e8_put_back_twice(trainer, run: Path) -> None:
    """What training did after the first time is not in what comes back the second time."""
    path = Path(yaml.safe_load(trainer.config.read_text())["model"]["path"])
    model, mover = model_of(path)
    assert train_step(WholeModel(model, CPU), mover, step_of(), LEARNING_RATE).applied
    pieces = resume_tensors(mover)
    kept = WholeTensors(
        {group: {name: p.local.clone() for name, p in named.items()} for group, named in pieces.items()}
    )
    whole = {
        group: {name: tensor.clone() for name, tensor in kept.groups[group].items()} for group in kept.groups
    }
    for _ in range(2):
        restore(kept, model, mover, "here")
        for group, named in resume_tensors(mover).items():
            assert all(torch.equal(piece.local, whole[group][name]) for name, piece in named.items())
        assert train_step(WholeModel(model, CPU), mover, step_of(), LEARNING_RATE).applied


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(one_rank(Path(sys.argv[1]), int(sys.argv[2]))))
