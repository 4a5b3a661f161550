"""Every item of a run's resume state counts: left out in turn, each makes a resumed run differ from one that
was never interrupted. The windows are hard ones: the second epoch, in which a third begins, gradients that
are not finite around the cut, a jump of the loss, a loss scale that falls and rises, evaluations; every
step's checkpoint is compared.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from glm_accelerate.checkpoint.audit import compare
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.optim.precision import Scale
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training import loop
from glm_accelerate.training.run import train
from glm_accelerate.training.state import Progress
from glm_accelerate.training.step import StepOutcome, WholeModel

Said = dict[str, Any]
Item = tuple[str, ...]  # of an item: weights, a moment's name, or keys into state.json
LAST, CUT = 14, 8  # 22 samples in steps of 4: the epochs begin with steps 1, 7 and 12
FIRST = 4.0  # loss scale
ELSEWHERE = {"plan", "told", "lowered"}  # of judging: test_evaluation asks other questions, and what is told


@dataclass(frozen=True)
class Window:
    """Where the loss jumps, which steps are not finite, and which items cannot show in it."""

    compute: str
    jump: int
    bad: tuple[int, ...]
    still: frozenset[str]


WINDOWS = {
    "float32": Window("float32", 5, (7, 8, 9), frozenset({"scale", "wide", "dealing", "pace"})),
    "float16": Window(
        "float16", 4, (5, 6, 10), frozenset({"bad", "bad_in_a_row", "dealing", "pace"})
    ),  # lowered, never bad
}


@pytest.fixture
def configure(tiny_run: Said, monkeypatch: pytest.MonkeyPatch) -> Callable[[Window], RunConfig]:
    """The tiny run with dropout, saving each step; at some steps what training computes is spoilt."""
    return lambda window: _config(tiny_run, monkeypatch, window)


def _config(tiny_run: Said, monkeypatch: pytest.MonkeyPatch, window: Window) -> RunConfig:
    real = loop.train_step

    def spoilt(passes: WholeModel, *more: Any) -> StepOutcome:
        def spoiling(step: Step, scale: float) -> Tensor:
            loss = passes(step, scale)
            if step.number in window.bad:
                next(one.grad for one in passes.model.parameters() if one.grad is not None).fill_(
                    float("inf")
                )
            return loss * 100 if step.number == window.jump else loss

        return real(spoiling, *more)

    monkeypatch.setattr(loop, "train_step", spoilt)
    sections = {
        "precision": {"compute": window.compute, "loss_scale": FIRST, "raise_after": 3},
        "train": {"steps": LAST, "step_samples": 4, "max_bad_steps": 5},
        "evaluate": {"every": 3, "metrics": ["loss"], "lower_rate_after": 1, "margin": 100.0, "lag": 2},
        "checkpoint": {"every": 1, "wait": True, "keep_last": LAST},
    }
    return RunConfig.model_validate({**tiny_run, **sections})


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"checkpoint-{step}"


def at_the_start(window: Window) -> Said:
    scale = Scale(FIRST) if window.compute == "float16" else None
    return Progress(scale=scale).to_json()


def items(reader: Reader, window: Window) -> Iterator[Item]:
    """All that the checkpoint holds: found in it, so that nothing new is forgotten here."""
    yield (WEIGHTS,)
    for moment in sorted({name.partition("::")[2] for name in reader.names(OPTIMIZER)}):
        yield (OPTIMIZER, moment)
    fresh = at_the_start(window)
    for key, value in reader.state().items():
        if key in window.still:
            assert value == fresh[key]
            continue
        assert value != fresh[key], f"{key} is as at the start: this window shows nothing of it"
        parts = isinstance(value, dict) and fresh[key] is not None and value.keys() == fresh[key].keys()
        for part in sorted(value.keys() - ELSEWHERE) if parts else ("",):
            assert not parts or value[part] != fresh[key][part], f"{key}.{part} is as at the start"
            yield (key, part) if parts else (key,)


def leave_out(run: Path, item: Item, window: Window) -> None:
    """The checkpoint as if the item had been forgotten: zeros for tensors, values as at the start."""
    reader = Reader(at(run, CUT))
    groups = {group: reader.group(group) for group in (WEIGHTS, OPTIMIZER)}
    state, manifest, fresh = reader.state(), reader.manifest, at_the_start(window)
    if item[0] in groups:
        for name, tensor in groups[item[0]].items():
            if item in ((WEIGHTS,), (OPTIMIZER, name.partition("::")[2])):
                tensor.zero_()
    elif len(item) == 2:
        state[item[0]][item[1]] = fresh[item[0]][item[1]]
    else:
        state[item[0]] = fresh[item[0]]
    shutil.rmtree(at(run, CUT))
    shutil.rmtree(run / "evals")  # else what was answered would be read there again
    pieces = {group: {name: part_of(t) for name, t in one.items()} for group, one in groups.items()}
    checkpointer = Checkpointer(run, run_id=manifest.run)
    checkpointer.save(
        Save(CUT, manifest.attempt, pieces, state, manifest.fingerprints, manifest.facts), wait=True
    )
    assert [outcome.error for outcome in checkpointer.close(1.0)] == [None]


def first_difference(whole: Path, other: Path, last: int) -> int | None:
    """The first step after the cut whose checkpoints differ, or one of which is not there."""
    for step in range(CUT + 1, last + 1):
        if not at(other, step).is_dir() or list(compare(at(whole, step), at(other, step))):
            return step
    return None


@pytest.mark.parametrize("name", WINDOWS)
def test_every_item_left_out_is_noticed(
    name: str, configure: Callable[[Window], RunConfig], tmp_path: Path
) -> None:
    window = WINDOWS[name]
    config = configure(window)
    whole, cut, again = (tmp_path / name for name in ("whole", "cut", "again"))
    assert train(config, whole).done
    assert not train(config, cut, stop_after=CUT).done
    noticed: dict[str, int | None] = {}
    for item in [(), *items(Reader(at(cut, CUT)), window)]:
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(cut, again, symlinks=True)
        if item:
            leave_out(again, item, window)
        found = None
        for last in (CUT + 1, LAST):  # most show at once
            try:
                train(config, again, stop_after=last)
            except UserError:
                found = CUT
            if (found := found or first_difference(whole, again, last)) is not None:
                break
        noticed[".".join(item)] = found
    assert noticed.pop("") is None, "nothing was left out"
    assert None not in noticed.values(), noticed
    assert len(noticed) >= 10
