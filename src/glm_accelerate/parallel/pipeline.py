"""A model divided over the pipeline axis: a rank has the layers of one stage; the first has the embedding
as well, the last stage the final norm and the head. One tensor travels from stage to stage, and its gradient
back; what else a pass needs (its documents, its shapes) every rank has of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from glm_accelerate.models.adapt import Prefix
from glm_accelerate.models.decoder import Block, Decoder
from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.place import Place
from glm_accelerate.parallel.table import WHOLE, Cut
from glm_accelerate.runtime.device import Stopwatch


@dataclass(slots=True)
class Stage:
    """This rank's stage and its messages to its neighbours, which arrive in the order of sending."""

    place: Place
    own: range  # the numbers of its layers
    layers: int  # of all stages
    learns_before: bool  # whether earlier stages train anything: else no gradient is sent to them
    tied: bool = False  # the first stage and the last have the embedding, which is the head, too
    entered: Tensor | None = None  # what `receive` returned last
    watch: Stopwatch | None = None  # over what it computes, not what it waits for
    carries: Callable[[int], torch.dtype] | None = None  # what enters a layer from a stage, by its number
    _sent: list[tuple[Work, Tensor]] = field(default_factory=list[tuple[Work, Tensor]])

    @property
    def index(self) -> int:
        """Its number, from the embedding on."""
        return self.place.index("pipeline")

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.place.count("pipeline")

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has norm and head."""
        return self.index == self.count - 1

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the stage before has sent for this pass."""
        if self.carries is not None:
            dtype = self.carries(self.own.start)
        self.entered = self._receive(torch.empty(shape, dtype=dtype, device=device), -1)
        return self.entered.requires_grad_(self.learns_before and torch.is_grad_enabled())

    def send(self, x: Tensor) -> Tensor:
        """To the next stage, before which this one may be by a few passes where there are no gradients.
        Returns what was sent.
        """
        if self.carries is not None:
            x = x.to(self.carries(self.own.stop))
        while len(self._sent) > self.count and not torch.is_grad_enabled():
            self._sent.pop(0)[0].wait()
        self._send(x.detach(), 1)
        return x

    def backward(self, entered: Tensor | None, out: Tensor) -> None:
        """Of a pass that came out as `out`: with the gradient that the next stage sends. That of what had
        entered goes to the stage before.
        """
        if not out.requires_grad:
            return
        empty = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        out.backward(None if self.last else self._receive(empty, 1))
        if entered is not None and self.learns_before:
            assert entered.grad is not None
            self._send(entered.grad, -1)

    def finish(self, embed: Tensor) -> None:
        """Wait until all is sent; give a tied embedding the sum of both ends' gradients."""
        while self._sent:
            self._sent.pop()[0].wait()
        if not self.tied or not embed.requires_grad:
            return
        if embed.grad is None:
            embed.grad = torch.zeros_like(embed)
        own = local_of(embed.grad)
        other, group = torch.empty_like(own), self.place.group("pipeline")
        peer = self.place.along("pipeline")[-1 if self.first else 0]
        both = (dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group))
        for work in dist.batch_isend_irecv(list(both)):
            work.wait()
        own.add_(other)

    def share(self, logits: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
        """The logits that the last stage has made, on every stage."""
        shared = like.new_empty(shape) if logits is None else logits.contiguous()
        dist.broadcast(shared, self.place.along("pipeline")[-1], group=self.place.group("pipeline"))
        return shared

    def _send(self, tensor: Tensor, towards: int) -> None:
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._neighbour(towards), group=self._group(towards))
        assert work is not None
        self._sent.append((work, tensor))

    def _receive(self, empty: Tensor, whence: int) -> Tensor:
        with self.watch.paused() if self.watch is not None else nullcontext():
            work = dist.irecv(empty, self._neighbour(whence), group=self._group(-whence))
            assert work is not None
            work.wait()
        return empty

    def _neighbour(self, step: int) -> int:
        return self.place.along("pipeline")[self.index + step]

    def _group(self, towards: int) -> ProcessGroup | None:
        """NCCL keeps one order of messages in a group: activations and gradients have a group each."""
        return self.place.group("pipeline", copy=towards < 0)


def keep_stage(
    model: Decoder,
    place: Place,
    layers: Sequence[int],
    device: torch.device,
    cuts: Mapping[str, Cut],
) -> dict[str, Cut]:
    """In place: what other stages have is gone. `layers`: how many each stage has. Layers keep their names.
    Returns the cuts of what is left; of a weight that two stages have, the first saves it.
    """
    index, bounds = place.index("pipeline"), [0, *accumulate(layers)]
    first, last = index == 0, index == len(layers) - 1
    own = range(bounds[index], bounds[index + 1])
    before = [*model.layers[: own.start], *([] if first else [model.embed])]
    tied = model.head.weight is model.embed and (first or last)
    learns_before = any(
        parameter.requires_grad
        for each in before
        for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])
    )
    cuts = dict(cuts)
    if isinstance(model.prefix, Prefix):  # every stage has all of it, and uses its own layers' part
        model.prefix.layers = slice(own.start, own.stop)
        learns_before = not first
        partial = ("pipeline", *cuts.get("prefix.weight", WHOLE).partial)
        cuts["prefix.weight"] = Cut(partial=partial, counted=first)
    for number in range(bounds[-1]):
        if number not in own:
            delattr(model.layers, str(number))
    for number, block in enumerate(model.layers):
        assert isinstance(block, Block)
        block.self_attn.layer = number  # in a cache of this stage's keys
    if not first and not tied:
        shape, dtype = (0, model.sizes.width), model.embed.dtype
        del model.embed
        # Of no rows: it says in which dtype and on which device things are here.
        model.register_buffer("embed", torch.empty(shape, dtype=dtype, device=device), persistent=False)
    if not last:
        del model.norm, model.head
    model.sizes = replace(model.sizes, layers=len(own))
    place.meet()
    model.stage = Stage(place, own, bounds[-1], learns_before, tied)
    kept = {name: cut for name, cut in cuts.items() if name in dict(model.named_parameters())}
    if tied:
        kept["embed"] = replace(kept.get("embed", WHOLE), counted=first, settled=False)
    return kept
