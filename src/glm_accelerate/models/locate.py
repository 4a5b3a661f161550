"""From what a user calls a model to a directory: a path, a name on Hugging Face, or `modelscope:NAME`."""

from pathlib import Path

from glm_accelerate.runtime.env import expanded, offline
from glm_accelerate.runtime.errors import UserError

FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def locate(name: str) -> Path:
    """The directory that holds the model, fetched first if it is a hub's name. Nothing in it is executed."""
    path = expanded(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            cure = "name the directory that has it"
            if (path / "adapter_config.json").is_file():
                cure = "it is an adapter: name its base here, and begin with it by --init-from"
            raise UserError("no config.json in the model directory", where=path, cure=cure)
        return path
    if name.startswith("modelscope:"):
        return _from_modelscope(name.removeprefix("modelscope:"))
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError("no such model directory", where=name, cure="check model.path")
    return _from_hugging_face(name)


def _from_hugging_face(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, local_files_only=offline()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        cure = "download it and give its directory, or try modelscope:NAME"
        if offline():
            cure += "; nothing is fetched while HF_HUB_OFFLINE or GLM_ACCELERATE_OFFLINE is set"
        what = f"neither a directory here nor to be had from Hugging Face: {first}"
        raise UserError(what, where=name, cure=cure) from error


def _from_modelscope(name: str) -> Path:
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("modelscope: names need its package", cure="pip install modelscope") from error
    try:
        return Path(str(snapshot_download(name, allow_patterns=FILES, local_files_only=offline())))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"not to be had from ModelScope: {error}", where=name, cure="check the name"
        ) from error
