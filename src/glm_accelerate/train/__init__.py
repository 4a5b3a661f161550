"""The training loop and what it is built from.

The room and the public function `glm_accelerate.train(config)` share a name, and Python binds a package's
name to its module once anything in it is imported: so the module itself is callable.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path

    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.train.run import Result


class TrainRoom(ModuleType):
    """This package, which trains when it is called."""

    def __call__(self, config: "RunConfig", directory: "Path | str" = "runs/run") -> "Result":
        """Train as the config says; see `train.run.train` for everything else that can be said."""
        from glm_accelerate.train.run import train

        return train(config, directory)


sys.modules[__name__].__class__ = TrainRoom
TRAIN = cast("TrainRoom", sys.modules[__name__])
