"""A directory of model files that appears whole or not at all, with what belongs beside the weights."""

import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from glm_accelerate.runtime.errors import UserError

A_DAY = 86400.0  # seconds

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def require_free(out: Path) -> Path:
    """Where links lead from `out`; a UserError where no new directory can be put in its place."""
    target = Path(os.path.realpath(out))
    if target.is_mount():
        raise UserError(
            "is a mount point, which cannot be replaced",
            where=out,
            cure=f"name one below it: {out / 'model'}",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError("exists already", where=out, cure="name a new directory")
    if target == Path(os.path.realpath(".")):
        raise UserError(
            "is the current directory, which cannot be replaced", where=out, cure="name a new one"
        )
    return target


@contextmanager
def new_directory(out: Path) -> Generator[Path]:
    """A directory to fill that becomes `out` when the block ends well, and vanishes when it does not."""
    out = require_free(out)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{glob.escape(out.name)}.????????.partial"):
            if time.time() - left.stat().st_mtime > A_DAY:  # by a kill: nobody fills it any more
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        yield partial
        partial.rename(out)  # an empty `out` is replaced; one that another has filled meanwhile is not
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be written: {error}", where=out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_files(source: Path, out: Path, names: Iterable[str]) -> list[str]:
    """Copies what there is of these; returns the names of what there is not."""
    absent: list[str] = []
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
        else:
            absent.append(name)
    return absent


def code_files(config: Path) -> list[str]:
    """The Python files that a config.json or tokenizer_config.json says its classes are in. They are copied
    for programs that run them: nothing here does.
    """
    content: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    files: set[str] = set()
    for classes in content.get("auto_map", {}).values():
        for name in classes if isinstance(classes, list) else [classes]:
            # `repository--module.Class` is fetched by whoever runs it
            if isinstance(name, str) and "--" not in name and "/" not in name:
                files.add(f"{name.partition('.')[0]}.py")
    return sorted(files)
