"""What has to be the same on every rank and node: compared before anything depends on it, told by name."""

import hashlib
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.runtime.env import node_name
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.parallel.ranks import Ranks

CURE = "the same versions, command and files on every node"
SHOWN = 3  # differences that are told one by one
LETTERS = 40  # of a value
SEEN = 15.0  # seconds for a file system to show on one node what was written on another


def facts_of(config: "RunConfig") -> dict[str, str]:
    """Versions, and what the config says, key by key."""
    said = config.model_dump(mode="json")
    keys = {f"{name}.{key}": str(value) for name, section in said.items() for key, value in section.items()}
    return {name: version(name) for name in ("glm-accelerate", "torch")} | keys


def model_digest(directory: Path) -> str:
    """Of a model's config.json, and of the names and sizes of its weights: cheap, so that every rank can."""
    sizes = sorted(f"{file.name} {file.stat().st_size}\n" for file in directory.glob("*.safetensors"))
    return hashlib.sha256((directory / "config.json").read_bytes() + "".join(sizes).encode()).hexdigest()


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What is not the same, in words; empty if nothing is."""
    odd = [
        f"{name} {theirs.get(name, 'none')[:LETTERS]}, not {ours.get(name, 'none')[:LETTERS]}"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(odd[:SHOWN]) + (f"; and {len(odd) - SHOWN} more" if len(odd) > SHOWN else "")


def require_alike(ranks: "Ranks", facts: Mapping[str, str]) -> None:
    """Refuses ranks on which these are not as on the first one."""
    if ranks.count == 1:
        return
    node, first = ranks.decide(lambda: [node_name(), dict(facts)])
    odd = differences(facts, first)
    here = f"rank {ranks.rank} on {node_name()}"
    told = ranks.gather(f"{here} differs from rank 0 on {node}: {odd}" if odd else "")
    if found := [sentence for sentence in told if sentence]:
        raise UserError(found[0], cure=CURE)


def require_shared(ranks: "Ranks", file: Path) -> None:
    """Refuses nodes that do not see a file as the first rank has just written it: each rank writes its part
    of a checkpoint beside it.
    """
    if ranks.count == 1:
        return
    content, ends = ranks.decide(lambda: file.read_text(encoding="utf-8")), time.monotonic() + SEEN
    while not (seen := _reads(file, content)) and time.monotonic() < ends:
        time.sleep(0.5)
    told = ranks.gather("" if seen else node_name())
    if missing := sorted({name for name in told if name}):
        what = f"node {', '.join(missing)} does not see what rank 0 wrote there"
        raise UserError(what, where=file.parent, cure="--run DIR on a file system that all nodes share")


def _reads(file: Path, content: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == content
    except OSError:
        return False
