"""Tokenized samples in a file, as both sides and the judge read them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tokens:
    """One sample: its tokens and, for each, whether it is learnt."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]

    @property
    def labels(self) -> NDArray[np.int64]:
        """As transformers wants them: the token itself where it is learnt, else -100 (it shifts inside)."""
        return np.where(self.targets, self.tokens.astype(np.int64), -100)


def write_samples(path: Path, samples: list[Tokens]) -> None:
    np.savez(
        path,
        tokens=np.concatenate([sample.tokens for sample in samples]),
        targets=np.concatenate([sample.targets for sample in samples]),
        ends=np.cumsum([len(sample.tokens) for sample in samples]),
    )


def read_samples(path: Path) -> list[Tokens]:
    with np.load(path, allow_pickle=False) as file:
        tokens, targets, ends = file["tokens"], file["targets"], file["ends"]
    cuts = ends[:-1]
    pairs = zip(np.split(tokens, cuts), np.split(targets, cuts), strict=True)
    return [Tokens(part, learnt) for part, learnt in pairs]
