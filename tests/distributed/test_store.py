"""What ranks tell each other through the store: of any length, heard by all, and nothing is left of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from torch.distributed import PrefixStore, TCPStore

from glm_accelerate.evaluate.answers import Share, _together
from glm_accelerate.parallel.ranks import Ranks, peer_ended
from glm_accelerate.runtime.errors import UserError

Act = Callable[[Ranks, Path], None]
Together = Callable[[Act, int], TCPStore]
LONG = "字" * 4_000_000 + "\ud800"  # 24 million letters as they travel; the store takes 8 MiB at once


def act(rank: int, what: Act, count: int, port: int, folder: Path) -> None:
    """A process of its own."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    what(Ranks(rank, count, PrefixStore("start-0", store)), folder)


@pytest.fixture
def together(tmp_path: Path) -> Together:
    """together(act, ranks): `act` in so many processes that meet as under a launcher; the store after it."""

    def run(what: Act, count: int) -> TCPStore:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(act, args=(what, count, store.port, tmp_path), nprocs=count)
        return store

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
    assert together(say_often, 3).num_keys() == 0


def fail(ranks: Ranks, folder: Path) -> None:
    """The first rank alone does it; the others would wait for ever."""
    with pytest.raises(UserError) as refused:
        ranks.decide(lambda: (folder / "nowhere").read_text())
    error = refused.value
    assert (error.what, error.where) == ("No such file or directory", str(folder / "nowhere"))
    assert error.told == (not ranks.first)
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
        _together(answer, range(ranks.rank, 4, 2), ranks)
    assert "No such file" in str(failed.value)
    assert ("rank 1 could not answer its share" in str(failed.value)) == ranks.first
    assert ranks.gather(ranks.rank) == [0, 1]


def test_a_rank_that_cannot_answer_its_share_is_heard(together: Together) -> None:
    together(share, 2)
