"""What cannot go together is refused by name, with a cure that is none of what was refused."""

import re
from typing import Any

import pytest

from glm_accelerate.memory.together import refuse
from glm_accelerate.runtime.errors import UserError

PLAIN: dict[str, Any] = {
    "offload": ("activations",),
    "fuse_update": False,
    "optimizer": "adamw",
    "limit": 1.0,
    "method": "lora",
    "compute": "bfloat16",
    "ranks": 2,
    "shards": 2,
}
FUSED: dict[str, Any] = {"fuse_update": True, "limit": 0.0, "ranks": 1, "shards": 1}


@pytest.mark.parametrize(
    "said",
    [
        {},
        FUSED,
        FUSED | {"optimizer": "adamw8bit", "method": "full"},
        {"offload": ("optimizer", "weights"), "ranks": 1, "shards": 1},
        {"offload": ("weights",), "shards": 1},
        {"optimizer": "adamw8bit", "shards": 1},
    ],
)
def test_what_goes_together(said: dict[str, Any]) -> None:
    refuse(**PLAIN | said)


@pytest.mark.parametrize(
    ("said", "names", "cure"),
    [
        (FUSED | {"limit": 1.0}, "optim.clip=1 ", "optim.clip=0"),
        (FUSED | {"compute": "float16"}, "precision.compute=float16", "precision.compute=bfloat16"),
        (FUSED | {"ranks": 2}, "memory.fuse_update", "memory.fuse_update=off"),
        (FUSED | {"offload": ("optimizer",)}, "memory.offload=[optimizer]", "memory.fuse_update=off"),
        ({"offload": ("optimizer",)}, "memory.offload=[optimizer]", "parallel.shard=full"),
        (
            {"offload": ("optimizer",), "ranks": 1, "compute": "float16"},
            "precision.compute=float16",
            "precision.compute=bfloat16",
        ),
        ({"offload": ("weights",)}, "memory.offload=[weights]", "one of the two"),
        ({"offload": ("weights",), "method": "full", "shards": 1}, "adapt.method=full", "adapt.method=lora"),
        ({"optimizer": "adamw8bit"}, "optim.name=adamw8bit", "parallel.shard=off"),
    ],
)
def test_what_does_not(said: dict[str, Any], names: str, cure: str) -> None:
    with pytest.raises(UserError, match=re.escape(names)) as refused:
        refuse(**PLAIN | said)
    assert cure in (refused.value.cure or "")
