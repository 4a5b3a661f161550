"""The steps of a run: each step's samples, laid into rows, made into batches in a thread ahead of need."""

import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import ARRANGE, BY_TOKENS, Arrangement, Dealing, arranged
from glm_accelerate.data.types import DOCUMENT_ALIGNMENT, IGNORED, Batch, Piece, Sample, Step

T = TypeVar("T")


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Sample: ...


def batches(samples: Samples, numbers: Sequence[int], batching: str, micro_tokens: int) -> Iterator[Batch]:
    """The given samples as batches of at most `micro_tokens` positions."""
    chosen = [samples[number] for number in numbers]
    for arrangement in ARRANGE[batching]([len(sample) for sample in chosen], micro_tokens):
        yield collate(arrangement, chosen)


def steps(
    samples: Samples,
    order: Order,
    *,
    batching: str,
    micro_tokens: int,
    position: int,
    total: int,
    rank: int = 0,
    ranks: int = 1,
    context: int = 1,
    dealing: Dealing = BY_TOKENS,
) -> Generator[Step, None, None]:
    """The steps after the first `position` ones up to step `total`, with the batches of one of `ranks` ranks,
    of which `context` neighbours share what is longer than a pass.

    All ranks have equally many, if need be empty ones: models that are divided over ranks compute together.
    """

    def make() -> Iterator[Step]:
        for number, epoch, drawn in order.steps_from(position):
            if number > total:
                return
            chosen = [samples[int(sample)] for sample in drawn]
            lengths = [len(sample) for sample in chosen]
            passes = arranged(lengths, batching, micro_tokens, ranks, context, dealing)
            own = [collate(arrangement, chosen) for arrangement in passes[rank]]
            own += [empty_batch()] * (max(map(len, passes)) - len(own))
            yield Step(
                number,
                epoch,
                tuple(own),
                tuple(int(sample) for sample in drawn),
                tokens=sum(len(sample) for sample in chosen),
                targets=sum(int(sample.targets[1:].sum()) for sample in chosen),
            )

    return prefetch(make())


def collate(arrangement: Arrangement, samples: Sequence[Sample]) -> Batch:
    """Rows with one sample are one document, padding and all: a causal model never looks into the tail. The
    last token of a piece predicts the first of the next: labels follow from whole documents.
    """
    shape = (len(arrangement.rows), arrangement.width)
    tokens_RT = np.zeros(shape, dtype=np.int64)
    labels_RT = np.full(shape, IGNORED, dtype=np.int64)
    documents: list[tuple[int, ...]] = []
    tokens = 0
    for number, row in enumerate(arrangement.rows):
        start = 0
        lengths: list[int] = []
        sizes = [(index, len(samples[index])) for index in row]
        parts = [*arrangement.pieces, *(Piece(index, 0, size, size) for index, size in sizes)]
        for part in parts:
            sample, stop = samples[part.place], start + len(part)
            labels = np.where(sample.targets[1:], sample.tokens[1:], IGNORED)[part.start : part.stop]
            tokens_RT[number, start:stop] = sample.tokens[part.start : part.stop]
            labels_RT[number, start : start + len(labels)] = labels
            lengths.append(len(part))
            start = stop
        tokens += start
        tail = arrangement.width - start
        if len(parts) == 1:
            lengths = [arrangement.width]
        elif tail:
            lengths.append(tail)
        documents.append(tuple(lengths))
    members = [index for row in arrangement.rows for index in row]
    members += [piece.place for piece in arrangement.pieces if piece.start == 0]  # counted by one rank
    return Batch(
        tokens_RT=tokens_RT,
        labels_RT=labels_RT,
        documents=tuple(documents),
        samples=len(members),
        tokens=tokens,
        targets=int((labels_RT != IGNORED).sum()),
        pieces=arrangement.pieces,
    )


def empty_batch() -> Batch:
    """The smallest forward pass, from which nothing is learnt."""
    shape = (1, DOCUMENT_ALIGNMENT)
    tokens_RT, labels_RT = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    return Batch(tokens_RT, labels_RT, ((DOCUMENT_ALIGNMENT,),), samples=0, tokens=0, targets=0)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class _End:
    pass


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T, None, None]:
    """Yields what `items` yields, made in a thread a few ahead. Its errors are raised here; closing this ends
    the thread.
    """
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
