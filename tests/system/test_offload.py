"""Runs that keep less on the device: they learn what others learn, and go on bit for bit after a stop."""

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_accelerate.checkpoint.audit import compare
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.run import train
from glm_accelerate.training.settle import Start

Said = dict[str, Any]
FULL = ("adapt.method=full", "optim.learning_rate=0.001")


@pytest.fixture(autouse=True)
def eager() -> Generator[None, None, None]:
    """torchao compiles its updates for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def config(tiny_run: Said) -> RunConfig:
    return RunConfig.model_validate(
        {
            **tiny_run,
            "train": {"steps": 8, "step_samples": 4},
            "precision": {"compute": "float32"},
            "optim": {"epsilon": 1e-3},  # else Adam makes whole steps of gradients that are rounding alone
            "evaluate": {"every": 4},
            "checkpoint": {"every": 4, "wait": True},
        }
    )


def differ(one: Path, other: Path) -> bool:
    last = "checkpoints/checkpoint-8"
    return bool(list(compare(one / last, other / last)))


@pytest.mark.parametrize(
    "said",
    [
        ("memory.offload=[activations]",),
        ("memory.offload=[activations]", "memory.recompute=blocks"),
        ("memory.offload=[weights]",),
        ("memory.offload=[activations,weights]", "memory.recompute=blocks"),
        ("memory.offload=[weights]", "adapt.base=int8"),
        ("memory.offload=[optimizer]", *FULL),
        ("memory.offload=[optimizer]", "precision.compute=bfloat16", "precision.compile=off", *FULL),
        ("memory.fuse_update=on", "optim.clip=0", *FULL),
        ("optim.name=adafactor", *FULL),
        ("optim.name=adamw8bit", *FULL),
        ("optim.name=adamw8bit", "memory.offload=[optimizer]", *FULL),
    ],
    ids=" ".join,
)
def test_it_learns_the_same_and_goes_on(said: tuple[str, ...], config: RunConfig, tmp_path: Path) -> None:
    plain, whole, again = tmp_path / "plain", tmp_path / "whole", tmp_path / "again"
    rest = [word for word in said if not word.startswith(("memory", "optim.name"))]
    train(override(config, rest), plain)
    asked = override(config, said)
    train(asked, whole)
    shutil.copytree(whole, again, symlinks=True)
    train(asked, again, start=Start(resume="4"))
    assert not differ(whole, again)
    same = not any(word.startswith(("optim.name", "precision.compute=bf")) for word in said)
    if same:
        one, other = (Reader(run / "checkpoints/checkpoint-8").group("weights") for run in (plain, whole))
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        (("memory.fuse_update=on", *FULL), "optim.clip=0"),
        (("memory.fuse_update=on", "optim.clip=0", "train.micro_tokens=64", *FULL), "train.micro_tokens"),
        (("memory.offload=[weights]", *FULL), "adapt.method=lora"),
    ],
)
def test_what_does_not_go_together_is_refused(
    said: tuple[str, ...], cure: str, config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        train(override(config, said), tmp_path / "run")
    assert cure in (refused.value.cure or "")


def test_an_optimizer_that_moves_to_the_host_knows_every_digit(config: RunConfig, tmp_path: Path) -> None:
    """Of weights that a run has trained in float32, though the device holds them in bfloat16 from then on."""
    still = [*FULL, "optim.learning_rate=1e-12", "precision.compute=bfloat16", "precision.compile=off"]
    run = tmp_path / "run"
    train(override(config, still), run, stop_after=4)
    moved = override(config, [*still, "memory.offload=[optimizer]"])
    train(moved, run, start=Start(accept=frozenset({"config"})))
    before = Reader(run / "checkpoints/checkpoint-4").group("weights")
    after = Reader(run / "checkpoints/checkpoint-8").group("optimizer")
    masters = {name for name in before if f"{name}::master" in after}
    assert "embed" in masters
    for name in masters:
        assert not torch.equal(before[name], before[name].bfloat16().float())
        torch.testing.assert_close(after[f"{name}::master"], before[name], rtol=0, atol=1e-9)
