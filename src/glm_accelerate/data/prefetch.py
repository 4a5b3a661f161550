"""Makes items in a thread before they are needed, in order, a few ahead."""

import queue
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class _End:
    pass


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T, None, None]:
    """Yields what `items` yields. Whatever it raises is raised here; closing this ends the thread."""
    ready: queue.Queue[T | _Failed | _End] = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def put(item: T | _Failed | _End) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_End())
        except BaseException as error:  # noqa: BLE001 (handed to the consumer, who raises it)
            put(_Failed(error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        closed.set()
        thread.join()
