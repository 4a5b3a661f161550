"""One range of a file becomes one block of encoded samples, whichever process does it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from glm_accelerate.data.encode import (
    Encoded,
    Kept,
    Labels,
    Left,
    Overlong,
    Rendered,
    encode_rendered,
    render,
)
from glm_accelerate.data.label import TrainOn
from glm_accelerate.data.read import FormatName, find_format, parse_line, read_lines
from glm_accelerate.data.scan import Range
from glm_accelerate.data.store import REMARKS_KEPT, EncodedBlock, Remark
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import FilePlace
from glm_accelerate.runtime.errors import UserError

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """How conversations become samples; the words are those of the config's `data` section."""

    format: Literal["auto"] | FormatName = "auto"
    template: str = "auto"
    train_on: TrainOn = "all"
    labels: Labels = "exact"
    max_tokens: int = 2048
    overlong: Overlong = "truncate"
    skip_bad: int = 0


@dataclass(frozen=True, slots=True)
class EncodingRecipe:
    """All that a worker has to know."""

    path: Path
    settings: EncodeSettings
    model_dir: Path

    def with_format(self, name: FormatName) -> "EncodingRecipe":
        """Told once for the whole file: a range in its middle must not judge by its own first line."""
        return replace(self, settings=replace(self.settings, format=name))


@dataclass(frozen=True, slots=True)
class Fault:
    """A UserError in transit."""

    what: str
    where: str | None
    cure: str | None


@dataclass(frozen=True, slots=True)
class RangeOutcome:
    """What became of a range: its block, its bad lines, and what else ended it early, if anything did."""

    block: EncodedBlock
    bad: tuple[Fault, ...]
    fatal: Fault | None


class Encoder:
    """Turns ranges of one file into outcomes; loads the tokenizer once."""

    def __init__(self, recipe: EncodingRecipe) -> None:
        self._path, self._settings = recipe.path, recipe.settings
        self._format: FormatName = find_format(recipe.path, recipe.settings.format)
        self._template = get_template(recipe.settings.template)
        self._tokenizer = load_tokenizer(recipe.model_dir, recipe.settings.template)

    def __call__(self, part: Range) -> RangeOutcome:
        settings = self._settings
        rendered: list[Rendered] = []
        bad: list[tuple[FilePlace, UserError]] = []
        encoded: list[Encoded] = []
        fatal: Fault | None = None
        try:
            for place, raw in read_lines(self._path, part.start, part.stop, line=part.line):
                try:
                    said = parse_line(raw, place, self._format)
                    rendered.append(render(said, self._template, settings.train_on, settings.labels))
                except UserError as error:
                    bad.append((place, error))
                    if len(bad) > settings.skip_bad:  # this range alone holds too many: the file ends here
                        break
            else:
                encoded = encode_rendered(
                    rendered, self._tokenizer, max_tokens=settings.max_tokens, overlong=settings.overlong
                )
        except UserError as error:
            fatal = _fault(error)
        return RangeOutcome(_block(encoded, bad), tuple(_fault(error) for _, error in bad), fatal)


def _fault(error: UserError) -> Fault:
    return Fault(error.what, error.where, error.cure)


def _block(encoded: Sequence[Encoded], bad: Sequence[tuple[FilePlace, UserError]]) -> EncodedBlock:
    kept = [one for one in encoded if isinstance(one, Kept)]
    left = [one for one in encoded if isinstance(one, Left)]
    shortened = [one.place for one in kept if one.truncated]
    tokens = np.concatenate([_NOTHING, *(one.tokens for one in kept)])
    learnt = np.concatenate([_NOTHING, *(one.targets for one in kept)]).astype(np.bool_)
    remarks = [Remark(place, f"unreadable: {error.what}") for place, error in bad[:REMARKS_KEPT]]
    remarks += [Remark(place, "truncated") for place in shortened[:REMARKS_KEPT]]
    for reason in {one.reason for one in left}:
        places = [one.place for one in left if one.reason == reason]
        remarks += [Remark(place, reason) for place in places[:REMARKS_KEPT]]
    return EncodedBlock(
        tokens=np.where(learnt, ~tokens, tokens),
        lengths=np.array([len(one) for one in kept], np.int32),
        targets=np.array([int(one.targets.sum()) for one in kept], np.int32),
        lines=np.array([one.place.line for one in kept], np.int32),
        truncated=len(shortened),
        dropped=Counter(one.reason for one in left),
        bad=len(bad),
        remarks=tuple(remarks),
    )
