"""What cannot go together is refused by name, with a cure that is none of what was refused."""

from dataclasses import replace
from typing import Any

import pytest

from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.levers import conflict
from glm_accelerate.runtime.errors import UserError

SIZES = Sizes(64, 32, 48, 2, 4, 2, 8, 1e-5, 1e4, 8, False, 128, sandwich=True)
PLAIN = Job(SIZES, offload=frozenset({"activations"}), ranks=2, shards=2)
SHARED: dict[str, Any] = {"tensor": 2, "offload": (), "shards": 1}
FUSED: dict[str, Any] = {"fuse_update": True, "ranks": 1, "shards": 1}


def error_of(changes: dict[str, Any]) -> UserError | None:
    """Clipped by 1 where nothing else is said and updates are not fused."""
    clip = 0.0 if changes.get("fuse_update") else 1.0
    job = {key: frozenset(value) if key == "offload" else value for key, value in changes.items()}
    clip = job.pop("clip", clip)
    return conflict(replace(PLAIN, **job), clip)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FUSED,
        FUSED | {"optimizer": "adamw8bit", "method": "full"},
        {"offload": ("optimizer", "weights"), "ranks": 1, "shards": 1},
        {"offload": ("weights",), "shards": 1},
        {"optimizer": "adamw8bit", "shards": 1},
    ],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert error_of(changes) is None


@pytest.mark.parametrize(
    ("changes", "names", "cure"),
    [
        (FUSED | {"clip": 1.0}, "optim.clip=1 ", "optim.clip=0"),
        (FUSED | {"compute": "float16"}, "precision.compute=float16", "precision.compute=bfloat16"),
        (FUSED | {"ranks": 2}, "memory.fuse_update", "memory.fuse_update=off"),
        (FUSED | {"offload": ("optimizer",)}, "memory.offload=[optimizer]", "memory.fuse_update=off"),
        (FUSED | {"passes": 2}, "several passes", "memory.fuse_update=off"),
        ({"offload": ("optimizer",)}, "memory.offload=[optimizer]", "parallel.shard=full"),
        (
            {"offload": ("optimizer",), "ranks": 1, "compute": "float16"},
            "precision.compute=float16",
            "precision.compute=bfloat16",
        ),
        ({"offload": ("weights",)}, "memory.offload=[weights]", "one of the two"),
        ({"offload": ("weights",), "method": "full", "shards": 1}, "adapt.method=full", "adapt.method=lora"),
        ({"optimizer": "adamw8bit"}, "optim.name=adamw8bit", "parallel.shard=off"),
        (SHARED | {"base": "nf4"}, "adapt.base=nf4", "one of the two"),
        (SHARED | {"compute": "fp8"}, "precision.compute=fp8", "one of the two"),
        (SHARED | {"optimizer": "adafactor"}, "optim.name=adafactor", "one of the two"),
        (FUSED | {"tensor": 2}, "memory.fuse_update is for one process", "memory.fuse_update=off"),
    ],
)
def test_what_does_not(changes: dict[str, Any], names: str, cure: str) -> None:
    error = error_of(changes)
    assert error is not None
    assert names in str(error)
    assert cure in (error.cure or "")
