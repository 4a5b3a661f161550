"""The rows that are being answered: prompts come in packed side by side, and then every row grows by a token
a pass. Inference mode is on only inside the methods, so that it never reaches whoever consumes an answer.

Letters: R living rows in the order of the cache's shelves, T tokens, H width.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from glm_accelerate.generate.sample import Sampling, pick
from glm_accelerate.generate.slots import Row
from glm_accelerate.kernels.choose import cache_dtype
from glm_accelerate.models.cache import KeyValueCache, Shelf
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout

READ = 4096  # tokens of prompts in one pass, or a single longer one: bounds what a pass needs in memory


Said = list[tuple[Row, list[int]]]  # what rows got in one or more passes


class Decoding:
    """A model, its cache, and who has which slot."""

    def __init__(self, model: Decoder, shelves: Sequence[Shelf], sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.device = model.embed.device
        self.generator = sampling.generator(self.device)
        dtype = cache_dtype(self.device, model.compute or model.embed.dtype)
        before = 0 if model.prefix is None else model.prefix()[0][0].shape[1]
        self.cache = KeyValueCache(model.sizes, shelves, dtype, self.device, before)
        self.shelves: list[list[Row]] = [[] for _ in shelves]  # who lives in the cache's slots
        self._last_R: Tensor | None = None  # every row's last token, until the rows change

    @property
    def living(self) -> list[Row]:
        return [row for shelf in self.shelves for row in shelf]

    @property
    def free(self) -> list[int]:
        """Slots of each shelf that nobody has."""
        return [self.cache.free(number) for number in range(len(self.shelves))]

    def read(self, coming: Sequence[tuple[Row, int]]) -> Said:
        """Let rows in, each on its shelf, and say their first tokens."""
        said: Said = []
        for first, behind in _passes([len(row.prompt) for row, _ in coming]):
            said += self._read(coming[first:behind])
        self._last_R = None
        return said

    @torch.inference_mode()
    def _read(self, coming: Sequence[tuple[Row, int]]) -> Said:
        """In one pass, packed."""
        lengths = [len(row.prompt) for row, _ in coming]
        self.cache.enter([shelf for _, shelf in coming], lengths)
        for row, shelf in coming:
            self.shelves[shelf].append(row)
        tokens_1T = torch.tensor([[token for row, _ in coming for token in row.prompt]], device=self.device)
        hidden_1TH = self.model.hidden(tokens_1T, Layout.of_documents([lengths], self.device), self.cache)
        last_N = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        tokens = self._pick(hidden_1TH[0, last_N]).tolist()
        return [(row, [token]) for (row, _), token in zip(coming, tokens, strict=True)]

    @torch.inference_mode()
    def grow(self, passes: int = 1) -> Said:
        """So many more tokens of every row; the device is waited for once."""
        rows = self.living
        last_R = self._last_R
        if last_R is None:
            last_R = torch.tensor([row.answer[-1] for row in rows], device=self.device)
        found: list[Tensor] = []
        for _ in range(passes):
            layout = Layout(((1,),) * len(rows), self.cache.positions_R[:, None])
            last_R = self._pick(self.model.hidden(last_R[:, None], layout, self.cache)[:, 0])
            found.append(last_R)
        self._last_R = last_R
        return list(zip(rows, torch.stack(found, 1).tolist(), strict=True))

    @torch.inference_mode()
    def drop(self, rows: Iterable[Row]) -> None:
        """These are answered. Their slots are free again."""
        gone = {row.number for row in rows}
        for number, shelf in enumerate(self.shelves):
            for slot in reversed(range(len(shelf))):
                if shelf[slot].number in gone:
                    self.cache.leave(number, slot)
                    shelf[slot] = shelf[-1]
                    shelf.pop()
        if gone:
            self._last_R = None

    def _pick(self, hidden_RH: Tensor) -> Tensor:
        return pick(self.model.head(hidden_RH), self.sampling, self.generator)


def _passes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours that are read in one pass, as (first, behind the last)."""
    found: list[tuple[int, int]] = []
    tokens = READ + 1
    for number, length in enumerate(lengths):
        if tokens + length > READ:
            found.append((number, number))
            tokens = 0
        found[-1] = (found[-1][0], number + 1)
        tokens += length
    return found
