"""Paths of a config as a run keeps them: absolute, so that every verb finds the same from any directory."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # models can be opened where the config's own library is not installed
    from glm_accelerate.config.schema import RunConfig, Source


def absolute(config: "RunConfig") -> "RunConfig":
    """The config with its local paths made absolute. A model that is no directory here is a hub's name."""
    model, data, metrics = config.model, config.data, config.evaluate.metrics
    return config.model_copy(
        update={
            "model": model.model_copy(update={"path": local_name(model.path)}),
            "data": data.model_copy(
                update={
                    "train": _sources(data.train),
                    "dev": None if data.dev is None else _sources(data.dev),
                    "cache": data.cache if data.cache == "auto" else _absolute(data.cache),
                }
            ),
            "evaluate": config.evaluate.model_copy(
                update={"metrics": [_absolute(name) if ".py:" in name else name for name in metrics]}
            ),
        }
    )


def local_name(model: str) -> str:
    """A model's directory as an absolute path; a hub's name as it is."""
    return _absolute(model) if os.path.isdir(os.path.expanduser(model)) else model


def _sources(sources: "list[Source]") -> "list[Source]":
    return [one.model_copy(update={"path": _absolute(one.path)}) for one in sources]


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())
