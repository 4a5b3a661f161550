"""Who we are among the processes of a job, and the little that they tell each other besides tensors.

A process alone is `ALONE`: the same calls, answered at once. So the trainer never asks how many there are.
"""

import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore, distributed_c10d

from glm_accelerate.parallel.heartbeat import Doing, beating
from glm_accelerate.runtime.device import take_local
from glm_accelerate.runtime.env import Launched, launched, signs_folder
from glm_accelerate.runtime.errors import UserError

MEETING = timedelta(minutes=10)  # for the last process to arrive
COLLECTIVE = timedelta(minutes=10)  # the longest that a rank may be behind the others in one operation
PATIENCE = timedelta(seconds=10)  # between two looks for what is said; there is no limit on how many
PIECE = 4 << 20  # letters of it in one value: the store cuts off who sets more than 8 MiB
MISTAKES = "mistakes"  # how many ranks have come to a UserError
LEFT, LEAVING = "left", 10.0  # how many are out of the last barrier; seconds for the others to be, too


class Told(UserError):
    """What another rank has come to, and says."""

    reported = True


class FirstFailed(RuntimeError):
    """The first rank has come to something else than a UserError, and says what."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number, how many there are, and where they meet."""

    rank: int = 0
    count: int = 1
    store: Store | None = None
    doing: Doing = field(default_factory=Doing, compare=False)
    _talks: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def first(self) -> bool:
        """Whether this is the one that decides, writes and prints."""
        return self.rank == 0

    def decide(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes of it (plain data), on all ranks; where it fails, all do. A UserError is
        raised on all, and what the system refuses (a full disk, a file that is gone) is one, too.

        The others wait as long as it takes: data may be prepared for hours, which no collective survives.
        """
        if self.store is None or self.count == 1:
            return make()
        key = f"decided-{next(self._talks)}"
        if not self.first:
            (said,) = _hear(self.store, [key], self.count - 1)
            return _made(said)
        try:
            made = _mistakes_named(make)
            _say(self.store, key, {"made": made})
        except UserError as error:
            _say(self.store, key, {"what": error.what, "where": error.where, "cure": error.cure})
            raise
        except Exception:
            _say(self.store, key, {})
            raise
        return made

    def gather(self, said: Any) -> list[Any]:
        """What every rank says (plain data), by rank, on all of them; whoever is first waits for the rest."""
        if self.store is None:
            return [said]
        number = next(self._talks)
        keys = [f"gathered-{number}-{rank}" for rank in range(self.count)]
        _say(self.store, keys[self.rank], said)
        return _hear(self.store, keys, self.count)

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
    said = launched()
    if said is None:
        yield ALONE
        return
    doing = Doing()
    with beating(signs_folder(), said.rank, doing):
        device = take_local(said.local)
        store = PrefixStore(f"start-{said.restart}", _store(said))
        dist.init_process_group(
            device.collectives,
            store=PrefixStore("group", store),
            rank=said.rank,
            world_size=said.count,
            timeout=COLLECTIVE,
        )
        try:
            with _one_mistake_said(store):
                yield Ranks(said.rank, said.count, store, doing)
                leave(store, said.count)
        except BaseException:
            # The others may wait for us in a collective: they hear it now, not when this process has ended.
            # destroy_process_group would wait for operations of NCCL that cannot end any more.
            if dist.is_initialized():
                distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
            raise


def leave(store: Store, count: int) -> None:
    """Together, as far as that goes: gloo aborts a process whose peer is gone while it is still in the
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
    """Whether this is what follows when another process fails or is gone: what matters is said there."""
    words = ("gloo", "NCCL", "closed by peer", "reset by peer")
    return isinstance(error, FirstFailed) or any(word in str(error) for word in words)


def _say(store: Store, key: str, said: Any) -> None:
    """In pieces that the store takes. Under the key itself stands how many they are, last: all is there."""
    text = json.dumps(said)
    starts = range(0, len(text), PIECE)
    for number, start in enumerate(starts):
        store.set(f"{key}-{number}", text[start : start + PIECE])
    store.set(key, str(len(starts)))


def _hear(store: Store, keys: list[str], readers: int) -> list[Any]:
    """What was said under these keys, as soon as all of it was. The last of the readers takes it away."""
    while not arrived(store, keys, PATIENCE):
        pass
    pieces = [[f"{key}-{number}" for number in range(int(store.get(key)))] for key in keys]
    heard = [json.loads(b"".join(map(store.get, each))) for each in pieces]
    count = f"{keys[0]}-heard"
    if store.add(count, 1) == readers:
        for key in (*keys, *itertools.chain.from_iterable(pieces), count):
            store.delete_key(key)
    return heard


def arrived(store: Store, keys: list[str], limit: timedelta) -> bool:
    """Whether all of them are, within that time."""
    try:
        store.wait(keys, limit)
    except RuntimeError as error:  # a store in a file has no kind of its own for it
        if "wait timeout" not in str(error).lower():
            raise
        return False
    return True


def _mistakes_named(make: Callable[[], Any]) -> Any:
    """What it makes; an error of the system in the form that a person is meant to read."""
    try:
        return make()
    except BrokenPipeError:  # nobody reads what we print: that is no mistake
        raise
    except OSError as error:
        raise UserError(error.strerror or str(error), where=error.filename) from error


def _made(said: dict[str, Any]) -> Any:
    """What the first rank made, on another one."""
    if "made" in said:
        return said["made"]
    if "what" in said:
        raise Told(said["what"], where=said["where"], cure=said["cure"])
    raise FirstFailed("the first rank failed")


@contextmanager
def _one_mistake_said(store: Store) -> Generator[None, None, None]:
    """Ranks may all come to the same UserError, or one to its own and the others to its silence: who is the
    first says it, the others end with it.
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


def _store(said: Launched) -> Store:
    """The file of our own launcher; torchrun's store where it has one, else the first rank's."""
    if said.meeting is not None:
        return FileStore(said.meeting, -1)
    serves = said.rank == 0 and not said.agent_store
    return TCPStore(said.address, said.port, said.count, is_master=serves, timeout=MEETING)
