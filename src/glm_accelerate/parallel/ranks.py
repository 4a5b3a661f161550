"""Who we are among the processes of a job, and the few messages that they exchange besides tensors.

A process alone is `ALONE`: the same calls, answered at once. So the trainer never asks how many there are.
"""

import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore, distributed_c10d

from glm_accelerate.parallel.heartbeat import Doing, beating
from glm_accelerate.runtime.device import take_local
from glm_accelerate.runtime.env import launched, node_name, signs_folder
from glm_accelerate.runtime.errors import UserError

MEETING = timedelta(minutes=10)  # for the last process to arrive
COLLECTIVE = timedelta(minutes=10)  # the longest that a rank may be behind the others in one operation
PATIENCE = timedelta(seconds=10)  # between two looks for a message; there is no limit on how many
PIECE = 4 << 20  # characters of it in one value: the store cuts off who sets more than 8 MiB
MISTAKES = "mistakes"  # how many ranks have come to a UserError
LEFT, LEAVING = "left", 10.0  # how many are out of the last barrier; seconds for the others to be, too


class Told(UserError):
    """Another rank's mistake, which that rank reports."""

    reported = True


class FirstFailed(RuntimeError):
    """The first rank has failed by something else than a UserError, and reports it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number, how many there are, and where they meet."""

    rank: int = 0
    count: int = 1
    store: Store | None = None
    doing: Doing = field(default_factory=Doing, compare=False)
    nodes: tuple[str, ...] = ()  # the name of each rank's node; (): all are on one
    groups: dict[object, Any] = field(
        default_factory=dict[object, Any], repr=False, compare=False
    )  # of Place
    _messages: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def first(self) -> bool:
        """Whether this is the one that decides, writes and prints."""
        return self.rank == 0

    def decide(self, make: Callable[[], Any]) -> Any:
        """The value that the first rank computes (plain data), on all ranks; where it fails, all do. A
        UserError is raised on all; what the system refuses (a full disk, a file that is gone) becomes one.

        The others wait as long as it takes: data may be prepared for hours, which no collective survives.
        """
        if self.store is None or self.count == 1:
            return make()
        key = f"decided-{next(self._messages)}"
        if not self.first:
            (message,) = _receive(self.store, [key], self.count - 1)
            if "value" in message:
                return message["value"]
            if "what" in message:
                raise Told(message["what"], where=message["where"], cure=message["cure"])
            raise FirstFailed("the first rank failed")
        try:
            value = _as_user_error(make)
            _send(self.store, key, {"value": value})
        except UserError as error:
            _send(self.store, key, {"what": error.what, "where": error.where, "cure": error.cure})
            raise
        except Exception:
            _send(self.store, key, {})
            raise
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (plain data), by rank, on all of them; whoever is first waits for the rest."""
        if self.store is None:
            return [value]
        number = next(self._messages)
        keys = [f"gathered-{number}-{rank}" for rank in range(self.count)]
        _send(self.store, keys[self.rank], value)
        return _receive(self.store, keys, self.count)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, the same to the last bit on each."""
        if self.count == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()


ALONE = Ranks()


@contextmanager
def joined() -> Generator[Ranks, None, None]:
    """Meets the other processes, if a launcher started us (ours, torchrun, or Slurm with their variables)."""
    job = launched()
    if job is None:
        yield ALONE
        return
    doing = Doing()
    with beating(signs_folder(), job.rank, doing):
        device = take_local(job.local)
        if job.meeting is not None:
            meeting: Store = FileStore(job.meeting, -1)  # our own launcher's file
        else:  # torchrun's store where it has one, else the first rank's
            meeting = TCPStore(
                job.address,
                job.port,
                job.count,
                is_master=job.rank == 0 and not job.agent_store,
                timeout=MEETING,
                master_listen_fd=job.listener,
            )
        store = PrefixStore(f"start-{job.restart}", meeting)
        dist.init_process_group(
            device.collectives,
            store=PrefixStore("group", store),
            rank=job.rank,
            world_size=job.count,
            timeout=COLLECTIVE,
        )
        try:
            with _reported_once(store):
                ranks = Ranks(job.rank, job.count, store, doing)
                if job.here < job.count:
                    ranks = replace(ranks, nodes=tuple(ranks.gather(node_name())))
                yield ranks
                leave(store, job.count)
        except BaseException:
            # The others may wait for us in a collective: it fails now, not when this process has ended.
            # destroy_process_group would wait for operations of NCCL that cannot end any more.
            if dist.is_initialized():
                distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
            raise


def leave(store: Store, count: int) -> None:
    """End together, as far as that goes: gloo aborts a process whose peer is gone while it is still in the
    barrier that both have passed.
    """
    dist.barrier()
    ends = time.monotonic() + LEAVING
    with suppress(RuntimeError):  # the store went with its process, which was out of the barrier
        store.add(LEFT, 1)
        while store.add(LEFT, 0) < count and time.monotonic() < ends:
            time.sleep(0.01)
    dist.destroy_process_group()


def peer_ended(error: RuntimeError) -> bool:
    """Whether this is what follows when another process fails or is gone, which reports the cause."""
    words = ("gloo", "NCCL", "closed by peer", "reset by peer")
    return isinstance(error, FirstFailed) or any(word in str(error) for word in words)


def _send(store: Store, key: str, message: Any) -> None:
    """In pieces that the store takes. Their number is set last, under the key itself: then all is there."""
    text = json.dumps(message)
    starts = range(0, len(text), PIECE)
    for number, start in enumerate(starts):
        store.set(f"{key}-{number}", text[start : start + PIECE])
    store.set(key, str(len(starts)))


def _receive(store: Store, keys: list[str], readers: int) -> list[Any]:
    """The messages under these keys, as soon as all are there. The last of the readers deletes them."""
    while not arrived(store, keys, PATIENCE):
        pass
    pieces = [[f"{key}-{number}" for number in range(int(store.get(key)))] for key in keys]
    messages = [json.loads(b"".join(map(store.get, each))) for each in pieces]
    count = f"{keys[0]}-received"
    if store.add(count, 1) == readers:
        for key in (*keys, *itertools.chain.from_iterable(pieces), count):
            store.delete_key(key)
    return messages


def arrived(store: Store, keys: list[str], limit: timedelta) -> bool:
    """Whether all of these keys are set within that time."""
    try:
        store.wait(keys, limit)
    except RuntimeError as error:  # a store in a file has no kind of its own for it
        if "wait timeout" not in str(error).lower():
            raise
        return False
    return True


def _as_user_error(make: Callable[[], Any]) -> Any:
    """The value that it computes; an error of the system becomes one that a person is meant to read."""
    try:
        return make()
    except BrokenPipeError:  # nobody reads what we print: that is no mistake
        raise
    except OSError as error:
        raise UserError(error.strerror or str(error), where=error.filename) from error


@contextmanager
def _reported_once(store: Store) -> Generator[None, None, None]:
    """All ranks may meet the same UserError, or one its own and the others that rank's silence: whoever is
    first reports it, the others end with it.
    """
    try:
        yield
    except UserError as error:
        with suppress(RuntimeError):  # the store may be gone with its process
            error.reported = error.reported or store.add(MISTAKES, 1) > 1
        raise
    except RuntimeError as error:
        with suppress(RuntimeError):
            if peer_ended(error) and store.check([MISTAKES]):
                raise Told("another rank could not go on") from error
        raise
