"""Who we are among the processes of a job, and the little that they tell each other besides tensors.

A process alone is `ALONE`: the same calls, answered at once. So the trainer never asks how many there are.
"""

import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from glm_accelerate.parallel.heartbeat import Doing, beating
from glm_accelerate.runtime.env import Launched, launched, signs_folder
from glm_accelerate.runtime.errors import UserError

MEETING = timedelta(minutes=10)  # for the last process to arrive
COLLECTIVE = timedelta(minutes=10)  # the longest that a rank may be behind the others in one operation
PATIENCE = timedelta(seconds=10)  # between two looks for a decision; there is no limit on how many


class ToldByFirst(UserError):
    """What the first rank raised."""

    told = True


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number, how many there are, and where they meet."""

    rank: int = 0
    count: int = 1
    store: Store | None = None
    doing: Doing = field(default_factory=Doing, compare=False)
    _decisions: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def first(self) -> bool:
        """Whether this is the one that decides, writes and prints."""
        return self.rank == 0

    def decide(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes of it (plain data), on all ranks; its UserError is raised on all, too.

        The others wait as long as it takes: data may be prepared for hours, which no collective survives.
        """
        if self.store is None:
            return make()
        key = f"decision-{next(self._decisions)}"
        if self.first:
            try:
                said = {"made": make()}
            except UserError as error:
                said = {"what": error.what, "where": error.where, "cure": error.cure}
                self.store.set(key, json.dumps(said))
                raise
            self.store.set(key, json.dumps(said))
            return said["made"]
        self._await([key], self.store)
        said = json.loads(self.store.get(key))
        if "made" not in said:
            raise ToldByFirst(said["what"], where=said["where"], cure=said["cure"])
        return said["made"]

    def gather(self, said: Any) -> list[Any]:
        """What every rank says (plain data), by rank, on all of them; whoever is first waits for the rest."""
        if self.store is None:
            return [said]
        number = next(self._decisions)
        keys = [f"gathered-{number}-{rank}" for rank in range(self.count)]
        self.store.set(keys[self.rank], json.dumps(said))
        self._await(keys, self.store)
        everything = [json.loads(self.store.get(key)) for key in keys]
        if self.store.add(f"gathered-{number}", 1) == self.count:  # all have read it
            for key in (*keys, f"gathered-{number}"):
                self.store.delete_key(key)
        return everything

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, the same to the last bit on each."""
        if self.count == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    @staticmethod
    def _await(keys: list[str], store: Store) -> None:
        while True:
            try:
                store.wait(keys, PATIENCE)
                return
            except DistStoreError:
                continue


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
        cuda = torch.cuda.is_available()
        if cuda:
            _take_device(said.local)
        store = PrefixStore(f"start-{said.restart}", _store(said))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("group", store),
            rank=said.rank,
            world_size=said.count,
            timeout=COLLECTIVE,
        )
        yield Ranks(said.rank, said.count, store, doing)
        dist.barrier()  # gloo aborts a process whose peer has left already
        dist.destroy_process_group()


def peer_ended(error: RuntimeError) -> bool:
    """Whether this is how a collective fails when another process is gone: what matters is said there."""
    return any(word in str(error) for word in ("gloo", "NCCL", "closed by peer", "reset by peer"))


def _store(said: Launched) -> Store:
    """The launcher's own store where it has one, else the first rank's."""
    serves = said.rank == 0 and not said.agent_store
    return TCPStore(said.address, said.port, said.count, is_master=serves, timeout=MEETING)


def _take_device(local: int) -> None:
    if local >= torch.cuda.device_count():
        raise UserError(
            f"process {local + 1} of this machine has no GPU: there are {torch.cuda.device_count()}",
            cure=f"--nproc {torch.cuda.device_count()}",
        )
    torch.cuda.set_device(local)
