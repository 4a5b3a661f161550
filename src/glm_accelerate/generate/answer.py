"""Answers to prompts: a batch's prompts go through the model side by side in one row, unpadded, then each
gets one token at a time against the cache. Rows that have stopped are dropped, so nobody waits for them.
"""

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from glm_accelerate.generate.sample import GREEDY, Sampling, pick
from glm_accelerate.kernels.choose import cache_dtype
from glm_accelerate.models.cache import KeyValueCache
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.runtime.errors import UserError

Tokens = Sequence[int]


def generate(
    model: Decoder,
    prompts: Sequence[Tokens],
    *,
    stops: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    batch: int = 16,
) -> list[list[int]]:
    """The answer to each prompt, without the token that stopped it. None outgrows the model's positions."""
    for number, prompt in enumerate(prompts):
        _check(model, prompt, f"prompt {number}")
    longest_first = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    generator = sampling.generator(model.embed.device)
    answers: list[list[int]] = [[] for _ in prompts]
    with evaluating(model):
        for start in range(0, len(prompts), batch):
            numbers = longest_first[start : start + batch]
            decoding = _Decoding(
                model, [prompts[number] for number in numbers], max_new_tokens, sampling, generator
            )
            while decoding.living:
                kept: list[int] = []
                for row, token in enumerate(decoding.next_tokens()):
                    number = numbers[row]
                    if token in stops:
                        continue
                    answers[number].append(token)
                    if len(answers[number]) < _room(model, prompts[number], max_new_tokens):
                        kept.append(row)
                numbers = [numbers[row] for row in kept]
                decoding.keep(kept)
    return answers


def stream(
    model: Decoder,
    prompt: Tokens,
    *,
    stops: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
) -> Iterator[int]:
    """One answer, token by token, as they come."""
    _check(model, prompt, "the prompt")
    generator = sampling.generator(model.embed.device)
    with evaluating(model):
        decoding = _Decoding(model, [prompt], max_new_tokens, sampling, generator)
        for _ in range(_room(model, prompt, max_new_tokens)):
            (token,) = decoding.next_tokens()
            if token in stops:
                return
            yield token


class _Decoding:
    """The rows of one batch that are still being answered. Inference mode is on only inside its methods,
    so that it never reaches whoever consumes a stream.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> None:
        self.model, self.sampling, self.generator = model, sampling, generator
        self.prompts = prompts
        self.living = len(prompts) if max_new_tokens > 0 else 0
        device = model.embed.device
        dtype = cache_dtype(device, model.compute or model.embed.dtype)
        capacity = max(len(prompt) + _room(model, prompt, max_new_tokens) for prompt in prompts)
        self.cache = KeyValueCache(model.sizes, len(prompts), capacity, dtype, device)
        self.last_B = torch.empty(0, dtype=torch.long, device=device)

    @torch.inference_mode()
    def next_tokens(self) -> list[int]:
        """One more token of every living row."""
        hidden_BH = self._grow() if self.cache.filled else self._read()
        self.last_B = pick(self.model.head(hidden_BH), self.sampling, self.generator)
        return self.last_B.tolist()

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but these."""
        if rows and len(rows) < self.living:
            chosen = torch.tensor(rows, device=self.last_B.device)
            self.cache.keep(chosen)
            self.last_B = self.last_B[chosen]
        self.living = len(rows)

    def _read(self) -> Tensor:
        """All prompts at once, packed; what the head reads at each one's last token."""
        device = self.last_B.device
        lengths = [len(prompt) for prompt in self.prompts]
        tokens_1T = torch.tensor([[token for prompt in self.prompts for token in prompt]], device=device)
        layout = Layout.of_documents([lengths], device)
        hidden_1TH = self.model.hidden(tokens_1T, layout, self.cache)
        return hidden_1TH[0, torch.tensor(lengths, device=device).cumsum(0) - 1]

    def _grow(self) -> Tensor:
        layout = Layout(((1,),) * self.living, self.cache.lengths_B[:, None])
        return self.model.hidden(self.last_B[:, None], layout, self.cache)[:, 0]


@contextmanager
def evaluating(model: Decoder) -> Generator[None]:
    """Without dropout, and afterwards as before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _room(model: Decoder, prompt: Tokens, max_new_tokens: int) -> int:
    return min(max_new_tokens, model.sizes.max_positions - len(prompt))


def _check(model: Decoder, prompt: Tokens, name: str) -> None:
    positions = model.sizes.max_positions
    if not prompt:
        raise UserError(f"{name} is empty", cure="a prompt has at least one token")
    if len(prompt) >= positions:
        raise UserError(
            f"{name} has {len(prompt)} tokens, the model has {positions} positions",
            cure="shorten it, so that an answer fits behind it",
        )
