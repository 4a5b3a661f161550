"""What ranks tell each other through the store: of any length, heard by all, and nothing is left of it. In
our launcher's file and in torchrun's server alike.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from torch.distributed import FileStore, PrefixStore, TCPStore

from glm_accelerate.evaluate.measuring.answers import Share, _gather
from glm_accelerate.parallel.ranks import Ranks, arrived, peer_ended
from glm_accelerate.runtime.errors import UserError

Act = Callable[[Ranks, Path], None]
Together = Callable[[Act, int], list[str]]
LONG = "字" * 4_000_000 + "\ud800"  # 24 million letters as they travel; torchrun's store takes 8 MiB at once


def act(rank: int, what: Act, count: int, port: int, folder: Path) -> None:
    """A process of its own."""
    store = TCPStore("127.0.0.1", port, is_master=False) if port else FileStore(str(folder / "store"), -1)
    what(Ranks(rank, count, PrefixStore("start-0", store)), folder)


@pytest.fixture(params=["file", "server"])
def together(request: pytest.FixtureRequest, tmp_path: Path) -> Together:
    """together(act, ranks): `act` in so many processes that meet as launched; the keys left after it."""

    def run(what: Act, count: int) -> list[str]:
        if request.param == "server":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        else:
            store, port = FileStore(str(tmp_path / "store"), -1), 0
        mp.start_processes(act, args=(what, count, port, tmp_path), nprocs=count, start_method="forkserver")
        return [key for key in store.list_keys() if key.startswith("start-0")]

    return run


def say_much(ranks: Ranks, folder: Path) -> None:
    assert ranks.gather(LONG) == [LONG] * ranks.count
    assert ranks.decide(lambda: LONG) == LONG
    assert ranks.gather([ranks.rank]) == [[0], [1]]


def test_what_is_said_may_be_long(together: Together) -> None:
    together(say_much, 2)


def say_often(ranks: Ranks, folder: Path) -> None:
    for talk in range(20):
        assert ranks.decide(lambda talk=talk: [talk]) == [talk]
        assert ranks.gather(ranks.rank) == [0, 1, 2]
        with pytest.raises(UserError, match="no"):
            ranks.decide(refuse)


def refuse() -> None:
    raise UserError("no")


def test_nothing_is_left_of_what_all_have_heard(together: Together) -> None:
    assert together(say_often, 3) == []


def wait_in_vain(ranks: Ranks, folder: Path) -> None:
    assert ranks.store is not None
    assert not arrived(ranks.store, ["never"], timedelta(seconds=0.1))
    ranks.gather(None)


def test_a_wait_has_a_limit(together: Together) -> None:
    together(wait_in_vain, 2)


def fail(ranks: Ranks, folder: Path) -> None:
    """The first rank alone does it; the others would wait for ever."""
    with pytest.raises(UserError) as refused:
        ranks.decide(lambda: (folder / "nowhere").read_text())
    error = refused.value
    assert (error.what, error.where) == ("No such file or directory", str(folder / "nowhere"))
    assert error.reported == (not ranks.first)
    unforeseen: list[tuple[type[Exception], Callable[[], object]]] = [
        (ZeroDivisionError, lambda: 1 / 0),
        (TypeError, lambda: object()),  # which cannot be said
        (BrokenPipeError, nobody_reads),
    ]
    for kind, make in unforeseen:
        with pytest.raises(kind if ranks.first else RuntimeError) as failed:
            ranks.decide(make)
        assert ranks.first or peer_ended(failed.value)
    assert ranks.decide(lambda: "well") == "well"


def nobody_reads() -> None:
    raise BrokenPipeError


def test_whatever_fails_in_the_first_rank_fails_all(together: Together) -> None:
    together(fail, 2)


def share(ranks: Ranks, folder: Path) -> None:
    def answer(mine: range) -> Share:
        if ranks.rank:
            (folder / "nowhere").read_text()
        return [(number, "text", {}) for number in mine], []

    with pytest.raises((UserError, FileNotFoundError)) as failed:
        _gather(answer, range(ranks.rank, 4, 2), ranks)
    assert "No such file" in str(failed.value)
    assert ("rank 1 could not answer its share" in str(failed.value)) == ranks.first
    assert ranks.gather(ranks.rank) == [0, 1]


def test_a_rank_that_cannot_answer_its_share_is_heard(together: Together) -> None:
    together(share, 2)
