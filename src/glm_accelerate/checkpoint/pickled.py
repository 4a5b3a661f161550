"""Tensors out of pickles: the only file where anything is unpickled. It happens in a process of its own, by
torch's reader that knows nothing but tensors; what that refuses is refused, and nothing but a safetensors
file comes back.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.runtime.errors import UserError

REFUSED = 2  # the child's exit code when the file is at fault
GROUPS = "groups"  # of an optimizer: which of its parameters share settings; JSON in the file's metadata

Tensors = dict[str, Tensor]
Metadata = dict[str, str]


def unpickle_apart(kind: str, pickled: Path, target: Path, cure: str) -> None:
    """Writes `target` from the tensors of `pickled`; `kind`: weights or optimizer.

    In a fresh interpreter, which doesn't look for modules in the current directory (-P): it may be the
    model's, with files of its own.
    """
    module = "glm_accelerate.checkpoint.pickled"
    words = [sys.executable, "-P", "-m", module, kind, str(pickled.resolve()), str(target.resolve())]
    child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"its reader ended with {child.returncode}"]
        raise UserError(lines[-1], where=pickled, cure=cure)


def unpickle(kind: str, pickled: Path, target: Path) -> None:
    """What the child does."""
    if not is_zipfile(pickled):
        raise UserError("refused: not a whole file as torch writes them since version 1.6")
    try:
        content: Any = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        other = re.search(r"GLOBAL (\S+)", str(error))  # without torch's advice to trust the file
        reason = f"it asks for {other[1]}, which is no tensor" if other else "it holds more than tensors"
        raise UserError(f"refused: {reason}") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0].partition(". ")[0]
        raise UserError(f"not a whole file of tensors: {first}") from error
    if not isinstance(content, dict):
        raise UserError(f"refused: holds {type(content).__name__}, not a table of tensors")
    tensors, metadata = KINDS[kind](content)
    save_file(_unshared(tensors), target, metadata={"format": "pt", **metadata})


def _weights(table: dict[Any, Any]) -> tuple[Tensors, Metadata]:
    """A model's: names and tensors, nothing else."""
    for name, tensor in table.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"refused: {name!r} is {type(tensor).__name__}, not a tensor")
    return table, {}


def _optimizer(table: dict[Any, Any]) -> tuple[Tensors, Metadata]:
    """An optimizer's, as `number::moment`; numbers count parameters in the order of the groups."""
    try:
        numbers = [[int(number) for number in group["params"]] for group in table["param_groups"]]
        moments = {
            f"{int(number)}::{moment}": value if isinstance(value, Tensor) else torch.tensor(float(value))
            for number, values in table["state"].items()
            for moment, value in values.items()
            if value is not None
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("refused: not the state of an optimizer") from error
    return moments, {GROUPS: json.dumps(numbers)}


KINDS: dict[str, Callable[[dict[Any, Any]], tuple[Tensors, Metadata]]] = {
    "weights": _weights,
    "optimizer": _optimizer,
}


def _unshared(table: Tensors) -> Tensors:
    """Each with a storage of its own, as a format without aliases needs it."""
    tensors: Tensors = {}
    storages: set[int] = set()
    for name, tensor in table.items():
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UserError(f"refused: {name} claims to be larger than what is stored of it")
        shared = tensor.untyped_storage().data_ptr() in storages
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    return tensors


def main(words: Sequence[str]) -> int:
    """The child's: one line on stderr says what is wrong."""
    kind, pickled, target = words
    try:
        unpickle(kind, Path(pickled), Path(target))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
