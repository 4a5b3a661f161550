"""Metrics of an answer by name: exact_match, bleu, rouge_1, rouge_2, rouge_l (`rouge` is all three), or the
user's own function as FILE.py:FUNCTION, called as function(reference, answer) -> float.
"""

import ast
import hashlib
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from glm_accelerate.evaluate.measuring.text import ROUGE, require_jieba, text_scores, word_cutter
from glm_accelerate.runtime.errors import UserError

Metric = Callable[[str, str], float]

TEXT = ("bleu", *ROUGE)
BUILT_IN = ("exact_match", *TEXT)
LARGEST = 1e50  # its powers are still finite


def needs_answers(metrics: Sequence[str]) -> bool:
    """Whether any of them is computed from answers."""
    return any(name != "loss" for name in metrics)


def metric_names(metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics of answers, each once and by its full name. A UserError names one that cannot be computed;
    the user's file is not run for that.
    """
    names: dict[str, None] = {}
    for name in metrics:
        if ".py:" in name:
            _check_own(name)
        elif name not in ("loss", "rouge", *BUILT_IN):
            nearest = get_close_matches(name, ("rouge", *BUILT_IN), n=1, cutoff=0.0)[0]
            raise UserError(f"no metric {name!r}", cure=f"{nearest}? Your own is FILE.py:FUNCTION")
        names |= dict.fromkeys(ROUGE if name == "rouge" else () if name == "loss" else (name,))
    if any(name in TEXT for name in names):
        require_jieba()
    return tuple(names)


def require_trust(config: Path, metrics: Sequence[str]) -> None:
    """Before executing metrics that a run's config names: the run may come from somebody else."""
    own = next((name for name in metrics if ".py:" in name), None)
    if own is not None:
        cure = "--trust, if you know what that file does"
        raise UserError(f"this run's config names code to execute: {own}", where=config, cure=cure)


def fingerprints(metrics: Sequence[str]) -> list[str]:
    """Each metric's name; with the user's own a digest of the file."""
    return sorted(f"{name} {_content(name)}" if ".py:" in name else name for name in metrics)


class Scorer:
    """Some metrics, loaded once. `broken`: the user's own that cannot be loaded, with the reason."""

    def __init__(self, names: Sequence[str]) -> None:
        self.broken: dict[str, str] = {}
        self._exact = "exact_match" in names
        self._text = [name for name in names if name in TEXT]
        self._cut = word_cutter() if self._text else str.split
        self._own: dict[str, Metric] = {}
        for name in names:
            if name not in BUILT_IN:
                try:
                    self._own[name] = _load(name)
                except Exception as error:  # noqa: BLE001  whatever a user's file raises becomes part of the result
                    self.broken[name] = _reason(error)

    def __call__(self, reference: str, answer: str) -> tuple[dict[str, float], dict[str, str]]:
        """The scores, and the errors of metrics without one."""
        scores = {"exact_match": float(reference.strip() == answer.strip())} if self._exact else {}
        if self._text:
            scores |= text_scores(self._text, reference, answer, self._cut)
        raised: dict[str, str] = {}
        for name, metric in self._own.items():
            try:
                score = float(metric(reference, answer))
                if not abs(score) < LARGEST:
                    raise ValueError(f"it returned {score}")
                scores[name] = score
            except Exception as error:  # noqa: BLE001  whatever it raises becomes part of the result
                raised[name] = _reason(error)
        return scores, raised


def _load(name: str) -> Metric:
    """Import the user's file. It finds modules beside it, as a script does."""
    path, _, function = name.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, Path(path).absolute())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).absolute().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def _content(name: str) -> str:
    path = Path(name.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _reason(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _check_own(name: str) -> None:
    path, _, function = name.rpartition(":")
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"the metric's file cannot be read: {error.strerror}", where=path) from error
    except (SyntaxError, ValueError) as error:  # ValueError: zero bytes, in Python 3.11
        what, where = str(error), path
        if isinstance(error, SyntaxError):
            what, where = error.msg, f"{path}:{error.lineno}"
        raise UserError(f"the metric's file is not Python: {what}", where=where) from error
    definitions: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            definitions |= {alias.asname or alias.name: node for alias in node.names}
    definition = definitions.get(function)
    if definition is None:
        nearest = next((f"{name}?" for name in get_close_matches(function, definitions, n=1)), None)
        raise UserError(f"there is no function {function!r}", where=path, cure=nearest)
    if isinstance(definition, ast.FunctionDef) and not _takes_two(definition.args):
        cure = f"def {function}(reference: str, answer: str) -> float"
        raise UserError("a metric is called with two texts", where=f"{path}:{definition.lineno}", cure=cure)


def _takes_two(arguments: ast.arguments) -> bool:
    places = len(arguments.posonlyargs) + len(arguments.args)
    needed = places - len(arguments.defaults)
    return needed <= 2 and (places >= 2 or arguments.vararg is not None) and None not in arguments.kw_defaults
