"""The questions of the stock way, in our own words: those of its shipped settings (`combine: true`), whose
prompts hold the answer, and those of `combine: false`, one for each answer of a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 512  # of prompt and of reference, as shipped: max_input_length, max_output_length


@dataclass(frozen=True)
class Question:
    """What generation is given, and what its output is scored against (with the token that ends it)."""

    prompt: list[int]
    reference: list[int]


def leaking(whole: Sequence[int], assistant: int, stop: int, longest: int = LONGEST) -> list[Question]:
    """`whole`: a conversation with its last answer, as the chat template writes it. All of it is the prompt,
    and its first token ([gMASK]) once more; the reference begins with the last `<|assistant|>`.
    """
    opened = len(whole) - 1 - list(reversed(whole)).index(assistant)
    prompt = [*whole[:longest], whole[0]]
    return [Question(prompt, [*whole[opened:], stop][:longest])]


def honest(
    turns: Sequence[Sequence[int]],
    roles: Sequence[str],
    opening: Sequence[int],
    stop: int,
    longest: int = LONGEST,
) -> list[Question]:
    """`turns`: each message as the chat template writes it alone, without the opening. A prompt that is too
    long loses its end, question and all, as it does there.
    """
    before = list(opening)
    asked: list[Question] = []
    for turn, role in zip(turns, roles, strict=True):
        if len(before) >= longest:
            break
        if role == "assistant":
            asked.append(Question([*before[:longest], turn[0]], [*turn[1:], stop][:longest]))
        before += turn
    return asked
