"""D. A resume under other conditions, through the real command. See README.md for the other cases.

Each begins with a copy of a finished run of 14 steps and goes back to step 9.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.parallel.part import part_of

BACK = ("--resume", "9")


def table(said: str) -> set[str]:
    """The first column of the table of then and now."""
    return {line.split()[0] for line in said.splitlines() if line.strip()} - {"what"}


ONE_OF_EACH = [
    ("optim.learning_rate=0.5", "schedule"),
    ("data.batching=pad", "order"),
    ("optim.clip=0.5", "updates"),
    ("adapt.dropout=0.3", "dropout"),
    ("precision.compute=float32", "precision"),
]
MORE = [
    ("optim.schedule=constant", "schedule"),
    ("train.steps=20", "schedule"),
    ("train.step_samples=2", "order"),
    ("train.seed=9", "order"),
]


@pytest.mark.parametrize(
    ("change", "subject"), [*ONE_OF_EACH, *(pytest.param(*one, marks=pytest.mark.prove) for one in MORE)]
)
def test_d3_d7_d8_what_has_to_be_accepted_by_name(
    change: str, subject: str, trainer, holds, refused, warned, run: Path
) -> None:
    """Refused with then, now and the flag; another flag does not do; with it the run goes on and says so."""
    key = change.partition("=")[0]
    for words in ([], ["--accept", "config"]):
        said = trainer.train(run, *BACK, change, *words)
        refused(said, key, f"--accept {subject}")
        assert key in table(said.out)
    again = trainer.train(run, *BACK, change, "--accept", subject)
    again_said = " ".join(again.out.split())
    assert again.code == 0, again
    assert f"{subject} was " in warned(run)
    assert "no longer bit-identical" in warned(run)
    assert "going on after step 9" in again_said
    holds(run)


@pytest.mark.parametrize(("change", "subject"), MORE)
def test_d3_d8_what_else_belongs_to_a_subject(change: str, subject: str, trainer, refused, run: Path) -> None:
    refused(trainer.train(run, *BACK, change), change.partition("=")[0], f"--accept {subject}")


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (["adapt.rank=8"], "adapt"),
        (["adapt.method=full"], "adapt"),
        (["optim.name=adafactor"], "optimizer"),
        (["data.template=glm4"], "template"),
        (["data.max_tokens=32"], "data"),
    ],
)
def test_d5_d6_d8_what_can_never_be_gone_on_with(
    words: list[str], subject: str, trainer, holds, refused, run: Path
) -> None:
    """Whatever is accepted. The cure is a new run on these weights."""
    said = trainer.train(run, *BACK, *words, "--accept-changes")
    refused(said, subject, "not what this checkpoint was made with", "--init-from")
    assert subject in table(said.out)
    assert "✓" not in said.out  # nothing was loaded and proved
    assert holds(run).name == "checkpoint-14"


@pytest.mark.parametrize("kind", ["one row", "another order", "shorter", "another file"])
def test_d4_other_data(kind: str, trainer, refused, run: Path, tmp_path: Path) -> None:
    """In the very file of the config: its name is the same, what is in it is not."""
    said = yaml.safe_load(trainer.config.read_text())
    lines = Path(said["data"]["train"]).read_text().splitlines(keepends=True)
    changed = {
        "one row": [lines[0].replace("German", "german", 1), *lines[1:]],
        "another order": lines[::-1],
        "shorter": lines[:-1],
        "another file": lines[:5] * 4,
    }[kind]
    with InPlace(Path(said["data"]["train"]), "".join(changed)):
        refused(
            trainer.train(run, *BACK, "--accept-changes"),
            "the data is not what this checkpoint was made with",
        )


@pytest.mark.parametrize("kind", ["layers", "one weight", "tokenizer"])
def test_d5_d6_another_model_in_its_place(kind: str, trainer, refused, make_other, run: Path) -> None:
    """Under the same path. Both are described; nothing is loaded."""
    with make_other(kind):
        said = trainer.train(run, *BACK, "--accept-changes")
    refused(said, "not what this checkpoint was made with", "--init-from")
    if kind == "layers":
        told = "".join(said.out.split())
        assert "2layersof32" in told
        assert "3layersof32" in told
    assert ("tokenizer" in table(said.out)) == (kind == "tokenizer")


def test_d9_another_number_of_threads(trainer, holds, warned, run: Path) -> None:
    """Goes on, and the run's record says that the last bit is not promised."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert trainer.train(run, "--resume", "12").code == 0
    finally:
        torch.set_num_threads(threads)
    assert f"threads was {threads}, now {threads + 1}: the same steps; no longer bit-identical" in warned(run)
    holds(run)


def test_d10_a_finished_run(trainer, holds, run: Path) -> None:
    said = trainer.train(run)
    assert said.code == 0
    assert "going on after step 14 of 14" in said.out
    assert "stopped at step 14: done" in said.out
    assert holds(run).name == "checkpoint-14"


def test_d11_weights_without_moments(trainer, refused, run: Path) -> None:
    """Such a checkpoint is no place to go on from; a new run can begin on it."""
    whole = Reader(run / "checkpoints" / "checkpoint-14")
    weights = {name: part_of(tensor) for name, tensor in whole.group("weights").items()}
    state, manifest = whole.state(), whole.manifest
    bare = Checkpointer(run, run_id=manifest.run)
    bare.save(
        Save(15, 1, {"weights": weights}, {**state, "position": 15}, manifest.fingerprints, manifest.facts)
    )
    assert [outcome.error for outcome in bare.outcomes()] == [None]
    path = run / "checkpoints" / "checkpoint-15"
    refused(trainer.train(run, "--resume", "15"), str(path), "holds weights only", "--init-from")
    assert trainer.train(run.with_name("new"), "--init-from", str(path), "train.steps=2").code == 0


@pytest.fixture
def make_other(trainer, tmp_path: Path) -> Callable[[str], "InPlace"]:
    """with make_other(kind): the model's directory holds another one."""

    def make(kind: str) -> InPlace:
        model = Path(yaml.safe_load(trainer.config.read_text())["model"]["path"])
        if kind == "one weight":
            file = model / "model.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            return InPlace(file, bytes(content))
        if kind == "layers":
            file = model / "config.json"
            return InPlace(file, json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 3}))
        file = model / "tokenizer.json"
        said = json.loads(file.read_text())
        words = {word: number for word, number in said["model"]["vocab"].items() if len(word) == 1}
        one, other = sorted(words)[-2:]
        said["model"]["vocab"] |= {one: words[other], other: words[one]}
        return InPlace(file, json.dumps(said))

    return make


class InPlace:
    """While entered, a file holds something else."""

    def __init__(self, path: Path, content: str | bytes) -> None:
        self.path, self.content = path, content

    def __enter__(self) -> None:
        self.aside = Path(shutil.copy2(self.path, self.path.with_name(f"{self.path.name}.aside")))
        self.path.write_bytes(self.content.encode() if isinstance(self.content, str) else self.content)

    def __exit__(self, *_: object) -> None:
        self.aside.replace(self.path)
