"""Special tokens: their numbers by name, and text around them."""

from collections.abc import Callable, Mapping, Sequence

from glm_accelerate.runtime.errors import UserError


def number_of(name: str, known: Mapping[str, int], where: object) -> int:
    """A UserError says what there is."""
    if name not in known:
        raise UserError(
            f"the tokenizer has no special token {name}",
            where=where,
            cure=f"it has {', '.join(known) or 'none'}: does data.template fit the model?",
        )
    return known[name]


def decode_around(
    ids: Sequence[int], names: Mapping[int, str], decode: Callable[[list[int]], str], *, skip: bool
) -> str:
    """Special tokens by their names, or left out; what stands between two is decoded by itself."""
    text, run = "", list[int]()
    for number in ids:
        if number not in names:
            run.append(number)
            continue
        text += decode(run) + ("" if skip else names[number])
        run = []
    return text + decode(run)
