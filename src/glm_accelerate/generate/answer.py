"""Answers to prompts. Rows grow side by side, each with its own room. Who has stopped leaves at once, and
prompts that wait move in as soon as enough slots are free to read several of them in one pass.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager

from glm_accelerate.generate.decoding import (
    Decoding,
    Row,
    affordable,
    manner_of,
    plan_shelves,
    take_fitting,
)
from glm_accelerate.generate.sample import GREEDY, Sampling
from glm_accelerate.models.cache import Shelf
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

Tokens = Sequence[int]

SHARE = 8  # prompts are read when one slot in so many is free: one at a time they would be read slowly


def generate(
    model: Decoder,
    prompts: Sequence[Tokens],
    *,
    stops: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    batch: int | None = None,
    on_answer: Callable[[int, list[int]], None] | None = None,
) -> list[list[int]]:
    """The answer to each prompt, without the token that stopped it. None outgrows the model's positions.

    At most `batch` rows grow at once, or as many as memory allows; `on_answer` hears of each as it ends.
    """
    rows = [_row(model, n, prompt, max_new_tokens, f"prompt {n}") for n, prompt in enumerate(prompts)]
    with evaluating(model):
        for row in _as_they_end(model, rows, stops, sampling, batch):
            if on_answer is not None:
                on_answer(row.number, row.answer)
    return [row.answer for row in rows]


def _as_they_end(
    model: Decoder, rows: Sequence[Row], stops: Collection[int], sampling: Sampling, batch: int | None
) -> Iterator[Row]:
    """Yield every row as soon as it has its whole answer."""
    yield from (row for row in rows if row.room <= 0)
    waiting = sorted((row for row in rows if row.room > 0), key=lambda row: (row.need, -row.number))
    if not waiting:
        return
    manner = manner_of(model.embed.device)
    needs = [row.need for row in waiting]
    shelves = plan_shelves(needs, batch or manner.rows, affordable(model), manner.alike)
    slots = sum(shelf.slots for shelf in shelves)
    decoding = Decoding(model, shelves, sampling)
    while waiting or decoding.living:
        coming: list[tuple[Row, int]] = []
        if waiting and slots - len(decoding.living) >= min(len(waiting), -(-slots // SHARE)):
            coming = take_fitting(waiting, shelves, decoding.free)
        if coming:
            new = decoding.read(coming)
        else:
            new = decoding.grow(min(manner.unseen, *(row.left for row in decoding.living)))
        ended = [row for row, tokens in new if take(row, tokens, stops)]
        decoding.drop(ended)
        yield from ended


def take(row: Row, tokens: Tokens, stops: Collection[int]) -> bool:
    """Add a row's next tokens. Whether its answer ended among them: what came after is dropped."""
    for token in tokens:
        if token in stops:
            return True
        row.answer.append(token)
        if not row.left:
            return True
    return False


def stream(
    model: Decoder,
    prompt: Tokens,
    *,
    stops: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
) -> Iterator[int]:
    """One answer, token by token, as they come."""
    row = _row(model, 0, prompt, max_new_tokens, "the prompt")
    if row.room <= 0:
        return
    with evaluating(model):
        decoding = Decoding(model, [Shelf(1, row.need)], sampling)
        new = decoding.read([(row, 0)])
        while not take(row, new[0][1], stops):
            yield row.answer[-1]
            new = decoding.grow()
        if not row.left:
            yield row.answer[-1]


@contextmanager
def evaluating(model: Decoder) -> Generator[None]:
    """Turn dropout off while this is entered."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _row(model: Decoder, number: int, prompt: Tokens, max_new_tokens: int, name: str) -> Row:
    """A row with room for its answer within the model's positions."""
    positions = model.sizes.max_positions
    if not prompt:
        raise UserError(f"{name} is empty", cure="a prompt has at least one token")
    if len(prompt) >= positions:
        raise UserError(
            f"{name} has {len(prompt)} tokens, the model has {positions} positions",
            cure="shorten it, so that an answer fits behind it",
        )
    return Row(number, prompt, min(max_new_tokens, positions - len(prompt)))
