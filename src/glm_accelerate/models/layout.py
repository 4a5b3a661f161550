"""The documents of a batch: what attention may see, and each token's position."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from glm_accelerate.data.types import Piece
from glm_accelerate.kernels.varlen_attention import Documents
from glm_accelerate.runtime.device import send


@dataclass(frozen=True)
class Layout:
    """`documents[r]` are the lengths that tile row r; a token sees its own document up to itself. The first
    ones of the only row may be `pieces` of documents whose other tokens are on other ranks.
    """

    documents: tuple[tuple[int, ...], ...]
    positions_BT: Tensor
    pieces: tuple[Piece, ...] = ()

    @staticmethod
    def of_documents(
        documents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        pieces: Sequence[Piece] = (),
    ) -> "Layout":
        """Positions count from 0 in each document, in its pieces too."""
        assert not pieces or len(documents) == 1, "pieces are of one row"
        starts = [piece.start for piece in pieces]
        rows = [
            torch.cat([torch.arange(a, a + n) for n, a in zip_longest(row, starts, fillvalue=0)])
            for row in documents
        ]
        positions_BT = send(torch.stack(rows), torch.device(device))
        return Layout(tuple(tuple(row) for row in documents), positions_BT, tuple(pieces))

    @staticmethod
    def of_positions(positions_BT: Tensor) -> "Layout":
        """A document starts wherever the position does not follow from the one before."""
        documents: list[tuple[int, ...]] = []
        for row in positions_BT.tolist():
            starts = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1] + 1), len(row)]
            documents.append(tuple(stop - start for start, stop in pairwise(starts)))
        return Layout(tuple(documents), positions_BT)

    @cached_property
    def whole_rows(self) -> bool:
        """Each row is one document: attention can run over the batch at once."""
        return all(len(row) == 1 for row in self.documents)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in the order of the flattened rows."""
        return tuple(length for row in self.documents for length in row)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """How many keys each sees, of which its own are the last."""
        return (*(piece.stop for piece in self.pieces), *self.lengths[len(self.pieces) :])

    @cached_property
    def packed(self) -> Documents:
        """The documents for kernels of packed rows, on the device: made when a layer first needs them."""
        return Documents.of(self.lengths, self.positions_BT.device, self.keys)
