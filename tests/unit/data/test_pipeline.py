"""The prefetcher keeps order, hands on errors, and leaves no thread behind."""

import threading
from collections.abc import Iterator

import pytest

from glm_accelerate.data.pipeline import prefetch


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_order() -> None:
    assert list(prefetch(range(100))) == list(range(100))
    assert not prefetchers()


def test_errors_arrive_after_what_came_before_them() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("broken sample")

    items = prefetch(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken sample"):
        next(items)
    assert not prefetchers()


def test_closing_early_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    items = prefetch(endless())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    items.close()
    assert not prefetchers()
