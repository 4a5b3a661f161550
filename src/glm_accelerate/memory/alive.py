"""Bytes of tensors that exist, counted as operators make them and as they are freed. On any device; what an
operator takes and gives back inside itself is not seen.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """While it is entered, `now` and `most` count the bytes of what was made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if id(storage) not in before and id(storage) not in self._known:
                self._watch(storage)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile fuses makes its tensors unseen

    def mark(self) -> None:
        """Begin a new count of the most."""
        self.most = self.now

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, count = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            self.now -= count
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += count
        self.most = max(self.most, self.now)


def storages(tree: object) -> list[torch.UntypedStorage]:
    """Of every tensor within. As long as one lives it is the same object: its id names it."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
