"""Looking up a special token by name, with an error that says what there is."""

from collections.abc import Mapping

from glm_accelerate.runtime.errors import UserError


def number_of(name: str, known: Mapping[str, int], where: object) -> int:
    if name not in known:
        raise UserError(
            f"the tokenizer has no special token {name}",
            where=where,
            cure=f"it has {', '.join(known) or 'none'}: does data.template fit the model?",
        )
    return known[name]
