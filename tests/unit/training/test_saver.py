"""Whether there is memory for the copy of a checkpoint's tensors, and what is said where there is not."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.config.schema import CheckpointSection
from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.part import part_of
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training import saver
from glm_accelerate.training.life import Life
from glm_accelerate.training.saver import Saver
from glm_accelerate.training.state import Progress

SIZE = 4_000_000  # bytes of the state


def warnings_of(
    ranks: Ranks, folder: Path, meanwhile: Callable[[], object] = bool, *, wait: bool = False
) -> list[str]:
    """Of a rank that gets ready to save."""
    heard: list[str] = []

    class Hearing:
        def observe(self, event: dict[str, Any]) -> None:
            heard.append(event["said"])

        def close(self) -> None: ...

    nothing: Any = None
    checkpointer = Checkpointer(folder)
    made = Saver(
        life=Life(folder, "", 1, Place(ranks, Axes(data=ranks.count)), Events([Hearing()], 1)),
        checkpointer=checkpointer,
        section=CheckpointSection(every=5, wait=wait),
        last_step=100,
        past=nothing,
        progress=Progress(),
        best=nothing,
        branch=nothing,
        pieces=lambda: {"weights": {"w": part_of(torch.zeros(SIZE // 4))}},
        settle=nothing,
        wanted=lambda: False,
        fingerprints={},
        facts={},
    )
    meanwhile()
    made.check()
    checkpointer.close(0)
    return heard


def test_the_ranks_of_a_host_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself would have room for its copy, and both together would not."""
    monkeypatch.setattr(saver, "host_memory", lambda: (100 * SIZE, 3 * SIZE))
    assert warnings_of(ALONE, tmp_path) == []
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        heard = pool.map(warnings_of, [Ranks(rank, 2, store) for rank in (0, 1)], [tmp_path] * 2)
    for (said,) in heard:
        assert "checkpoints stop training" in said
        assert "the copies of 2 ranks take" in said


def test_the_first_rank_sees_that_the_directory_is_another_one(tmp_path: Path) -> None:
    """Others have no file open in it: a network file system may give it another number on their machines."""

    def replaced(folder: Path) -> Callable[[], None]:
        folder.mkdir()

        def replace() -> None:
            folder.rename(tmp_path / f"{folder.name} moved")
            folder.mkdir()

        return replace

    run = tmp_path / "second"
    assert warnings_of(Ranks(1, 2, HashStore()), run, replaced(run), wait=True) == []
    run = tmp_path / "first"
    with pytest.raises(UserError, match="moved or replaced"):
        warnings_of(Ranks(0, 2, HashStore()), run, replaced(run), wait=True)
