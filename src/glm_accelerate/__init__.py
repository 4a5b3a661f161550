"""glm-accelerate: train GLM models fast, in little memory, without stalls. Importing this runs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm_accelerate.config.load import load_config
    from glm_accelerate.config.schema import AdaptSection, RunConfig
    from glm_accelerate.export.compress import compress, expand
    from glm_accelerate.models.adapt import adapt, merge
    from glm_accelerate.models.adapter_files import load_adapter, save_adapter
    from glm_accelerate.models.weights import load_model
    from glm_accelerate.models.write import save_model
    from glm_accelerate.runtime.errors import UserError
    from glm_accelerate.training.run import Result, train

WHERE = {
    "AdaptSection": "config.schema",
    "Result": "training.run",
    "RunConfig": "config.schema",
    "UserError": "runtime.errors",
    "adapt": "models.adapt",
    "compress": "export.compress",
    "expand": "export.compress",
    "load_adapter": "models.adapter_files",
    "load_config": "config.load",
    "load_model": "models.weights",
    "merge": "models.adapt",
    "save_adapter": "models.adapter_files",
    "save_model": "models.write",
    "train": "training.run",
}

__all__ = [
    "AdaptSection",
    "Result",
    "RunConfig",
    "UserError",
    "adapt",
    "compress",
    "expand",
    "load_adapter",
    "load_config",
    "load_model",
    "merge",
    "save_adapter",
    "save_model",
    "train",
]


def __getattr__(name: str) -> object:
    """A public name is looked up where it lives when first asked for: torch takes a second to import."""
    if name not in WHERE:
        raise AttributeError(f"glm_accelerate has no {name!r}")
    return getattr(import_module(f"glm_accelerate.{WHERE[name]}"), name)
