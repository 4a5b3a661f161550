"""What a machine can check of how this house is built. Each test lists every offence by file and line."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from glm_accelerate.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/glm_accelerate"
FILES = sorted(SRC.rglob("*.py"))

# A room imports from lower floors and from itself; rooms on one floor don't know each other.
FLOORS = (
    {"runtime"},
    {"config"},
    {"kernels", "data"},
    {"models"},
    {"generate"},
    {"prove", "memory"},
    {"plan"},
    {"parallel"},
    {"optim", "checkpoint", "observe"},
    {"assemble"},
    {"evaluate"},
    {"training"},
    {"export", "bench", "demo", "watch", "deploy"},
    {"cli"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL, LONGEST_DOCSTRING = 400, 60, 120, 5
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|base)(_|$)")
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*|__\w+__")
ALIAS = re.compile(r"_?(?:[A-Z][a-z0-9]*)+")


class Module:
    """One source file, parsed once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(SRC).as_posix()
        self.room = self.name.split("/")[0] if "/" in self.name else ""
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every imported module by its full name, lazy and typing-only imports included."""
        package = ["glm_accelerate", *self.name.split("/")[:-1]]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*start, *([node.module] if node.module else [])])
                yield from ((node, f"{module}.{alias.name}") for alias in node.names)


MODULES = [Module(path) for path in FILES]


def dotted(node: ast.AST) -> str:
    """`os.environ.get` of the expression; other parts are left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def offences(check: Callable[[Module], Iterator[str]]) -> list[str]:
    return [line for module in MODULES for line in check(module)]


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    return ((node, dotted(node.func)) for node in module.nodes if isinstance(node, ast.Call))


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_room_has_its_floor() -> None:
    assert len(MODULES) > 30
    assert {module.room for module in MODULES} - {""} <= set(FLOOR)


def test_lower_floors_never_import_higher_ones() -> None:
    def check(module: Module) -> Iterator[str]:
        for node, name in module.imports():
            parts = name.split(".")
            if parts[0] != "glm_accelerate" or not module.room or len(parts) < 2 or parts[1] == module.room:
                continue
            if parts[1] in FLOOR and FLOOR[parts[1]] >= FLOOR[module.room]:
                yield module.at(node, f"{module.room} imports {parts[1]}")

    assert offences(check) == []


def test_no_import_comes_back_to_where_it_began() -> None:
    """Imports within functions included: who needs the other lazily needs it all the same."""

    def name(path: Path) -> str:
        return ".".join(["glm_accelerate", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(
            ".__init__"
        )

    names = {name(module.path): module for module in MODULES}
    uses = {
        here: {
            part for _, used in module.imports() for part in (used, used.rpartition(".")[0]) if part in names
        }
        for here, module in names.items()
    }
    left = {here: used - {here} for here, used in uses.items()}
    while free := [here for here, used in left.items() if not used & left.keys()]:
        for here in free:
            del left[here]
    while outer := [here for here in left if not any(here in used for used in left.values())]:
        for here in outer:
            del left[here]
    assert sorted(left) == []


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.at(node, node.name))
    assert [found for found in places.values() if len(found) > 1] == []


def test_imports_are_absolute_and_never_of_everything() -> None:
    def check(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and (node.level or node.names[0].name == "*"):
                yield module.at(node, "relative import, or of *")

    assert offences(check) == []


def test_what_tests_and_benchmarks_import_is_there() -> None:
    """Of this library, by name; also in code that they start as text, which no import of theirs would try."""
    said = re.compile(r"from (glm_accelerate[.\w]*) import (\([^()]*\)|[\w ,]+)")
    asked: dict[tuple[str, str], str] = {}
    for path in (path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        for module, names in said.findall(path.read_text(encoding="utf-8")):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                asked.setdefault((module, name), path.relative_to(ROOT).as_posix())
    lacking: list[str] = []
    for (module, name), path in asked.items():
        found = importlib.import_module(module)
        if not hasattr(found, name) and name not in {
            inner.name for inner in pkgutil.iter_modules(getattr(found, "__path__", ()))
        }:
            lacking.append(f"{path}: {module}.{name}")
    assert sorted(lacking) == []


def test_models_and_kernels_are_single_device() -> None:
    def check(module: Module) -> Iterator[str]:
        for node, name in module.imports():
            if module.room in ("models", "kernels") and name.startswith("torch.distributed"):
                yield module.at(node, name)
        for node in module.nodes:
            if module.room in ("models", "kernels") and dotted(node).startswith("torch.distributed"):
                yield module.at(node, "torch.distributed")

    assert offences(check) == []


# Who may name one kind of device in strings: what a person reads or types, in which nothing is asked of it.
# Identifiers of it, and whatever is decided by it, are in its room alone (and in kernels that run on nothing
# else): for all others it has a record, so that another kind of device is one more file.
DEVICE_ROOMS = re.compile(r"runtime/devices/\w+\.py|kernels/triton_\w+\.py")
DEVICE_WORDS = {
    "runtime/env.py": "environment variables, all of which are read there, before torch is loaded",
    "config/stock_keys.py": "keys of other programs' configs, and what stands for them here",
    "cli/doctor.py": "what is wrong with an installation of CUDA, and the cure",
    "cli/machine.py": "names of environment variables and versions that a person reads",
    "cli/evaluate.py": "an example of a device, in the help",
}


def test_one_room_names_a_kind_of_device() -> None:
    def check(module: Module) -> Iterator[str]:
        if DEVICE_ROOMS.fullmatch(module.name):
            return
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        said = {id(node.body[0].value) for node in module.nodes if isinstance(node, documented)
                and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        for node in module.nodes:
            for field, value in ast.iter_fields(node):
                words = field == "value" and isinstance(node, ast.Constant)
                if words and (id(node) in said or module.name in DEVICE_WORDS):
                    continue
                if isinstance(value, str) and "cuda" in value.lower():
                    yield module.at(node, value)

    assert offences(check) == []


def test_files_are_named_for_their_subject() -> None:
    parts = [part for module in MODULES for part in module.name.removesuffix(".py").split("/")]
    assert [part for part in parts if BANNED_NAMES.search(part)] == []


def test_files_and_functions_are_short() -> None:
    def check(module: Module) -> Iterator[str]:
        if (lines := len(module.text.splitlines())) > LONGEST_FILE:
            yield f"{module.name}: {lines} lines"
        for node in functions(module):
            kernel = any("triton" in dotted(deco) or dotted(deco) == "jit" for deco in node.decorator_list)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (LONGEST_KERNEL if kernel else LONGEST_FUNCTION):
                yield module.at(node, f"{node.name} has {lines} lines")

    assert offences(check) == []


def test_every_module_says_what_it_is_in_at_most_five_lines() -> None:
    def check(module: Module) -> Iterator[str]:
        said = ast.get_docstring(module.tree)
        if said is None and module.tree.body:
            yield f"{module.name}: no docstring"
        elif said is not None and len(said.splitlines()) > LONGEST_DOCSTRING:
            yield f"{module.name}: a docstring of {len(said.splitlines())} lines"

    assert offences(check) == []


def test_one_file_reads_the_environment() -> None:
    def check(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if dotted(node) in ("os.environ", "os.environb", "os.getenv"):
                yield module.at(node, dotted(node))
        for node, name in module.imports():
            if name in ("os.environ", "os.environb", "os.getenv"):
                yield module.at(node, name)

    assert {line.split(":")[0] for line in offences(check)} <= {"runtime/env.py"}


def test_nothing_is_unpickled_or_executed() -> None:
    def check(module: Module) -> Iterator[str]:
        for node, name in module.imports():
            if name.split(".")[0] in UNPICKLERS and name != "pickle.UnpicklingError":
                yield module.at(node, name)
            if name.split(".")[0] == "yaml" and module.name != "config/strict_yaml.py":
                yield module.at(node, "yaml is for config/strict_yaml.py")
        for node, name in calls(module):
            if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
                yield module.at(node, name)
            if name.endswith("exec_module") and module.name != "evaluate/measuring/metrics.py":
                yield module.at(node, "a user's file is executed by evaluate/measuring/metrics.py alone")
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
                yield module.at(node, name)
            if name == "torch.load" and module.path.stem != "pickled":
                yield module.at(node, name)
            said = {word.arg: word.value for word in node.keywords}
            if name == "torch.load" and not _is(said.get("weights_only"), True):
                yield module.at(node, "torch.load without weights_only=True")
            for word in ("shell", "allow_pickle", "trust_remote_code"):
                if word in said and not _is(said[word], False):
                    yield module.at(node, word)

    assert offences(check) == []


def test_names_in_shared_folders_are_never_predictable() -> None:
    """Whoever takes such a name first would be believed, or have a link followed."""

    def check(module: Module) -> Iterator[str]:
        for node, name in calls(module):
            if name.endswith("mktemp") or (name.endswith("gettempdir") and module.name != "runtime/env.py"):
                yield module.at(node, name)
        for node in module.nodes:
            if isinstance(node, ast.Constant) and str(node.value).startswith(("/tmp/", "/var/tmp/")):
                yield module.at(node, str(node.value))

    assert offences(check) == []


# Who may hold what unpickles or listens, and why it is none that a stranger can reach.
CONNECTIONS = {
    "parallel/launch.py": "starts ranks, over pipes of its own",
    "parallel/seats.py": "waits until something comes, and reads it as JSON",
    "evaluate/measuring/grade.py": "a scorer started by us, over a socket pair",
    "data/workers.py": "workers started by us, over a socket pair",
    "watch/server.py": "on 127.0.0.1 to who has its token, and answers with files of the page and events",
    "training/probe.py": "copies of itself: they wait for each other and send nothing",
}
OBJECTS = re.compile(r"\w+_object(_list)?")  # torch's collectives of objects: pickles between ranks


def test_nothing_that_a_stranger_can_reach_is_unpickled() -> None:
    def check(module: Module) -> Iterator[str]:
        for node, name in module.imports():
            listens = name.startswith(
                ("multiprocessing.", "torch.multiprocessing", "socketserver", "http.server")
            )
            harmless = name.startswith(
                ("multiprocessing.resource_tracker", "torch.multiprocessing.reductions")
            )
            if listens and not harmless and module.name not in CONNECTIONS:
                yield module.at(node, name)
            if name.startswith(
                ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.rpc")
            ):
                yield module.at(node, name)
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and OBJECTS.fullmatch(node.attr):
                yield module.at(node, node.attr)

    assert offences(check) == []


def _is(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_failures_are_never_swallowed() -> None:
    """A handler for everything has to raise again; the command line alone turns what is left into exit 1."""

    def check(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds)
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield module.at(node, "except of everything")
            if len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                yield module.at(node, "a failure passed over (contextlib.suppress says it better, and why)")

    # These hand the failure on: as exit code 1, to the thread that waits for it, or with a result.
    handed_on = {
        "cli/main.py",
        "data/pipeline.py",
        "evaluate/measuring/metrics.py",
        "evaluate/protocol/evaluator.py",
    }
    assert [line for line in offences(check) if line.split(":")[0] not in handed_on] == []


def test_no_guessing_and_no_passing_through() -> None:
    def check(module: Module) -> Iterator[str]:
        for node, name in calls(module):
            if name == "hasattr":
                yield module.at(node, name)
        for node in functions(module):
            if node.args.kwarg is not None:
                yield module.at(node, f"{node.name}(**{node.args.kwarg.arg})")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and "mixin" in node.name.lower():
                yield module.at(node, node.name)

    assert offences(check) == []


def test_modules_hold_no_state() -> None:
    def check(module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.Global):
                yield module.at(node, f"global {', '.join(node.names)}")
        for node in module.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else targets
            flat = [
                part for item in targets for part in (item.elts if isinstance(item, ast.Tuple) else [item])
            ]
            for name in map(dotted, flat):
                if not (CONSTANT.fullmatch(name) or ALIAS.fullmatch(name)):
                    yield module.at(node, f"`{name}` is neither a CONSTANT nor a type")

    assert offences(check) == []


def test_importing_does_nothing() -> None:
    """Only definitions and constants at the outer level; an `if` may ask for TYPE_CHECKING or __name__."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    definitions = (ast.Import, ast.ImportFrom, *functions, ast.ClassDef, ast.Assign, ast.AnnAssign)

    def check(module: Module) -> Iterator[str]:
        for node in module.tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            question = isinstance(node, ast.If) and any(
                dotted(part) in ("TYPE_CHECKING", "__name__") for part in ast.walk(node.test)
            )
            if not (docstring or question or isinstance(node, definitions)):
                yield module.at(node, type(node).__name__)

    assert offences(check) == []


IMPORT_ALL = """
import os, random, signal, sys, threading, warnings
import numpy.typing, rich.console, rich.live, rich.progress, rich.table
import safetensors.torch, tokenizers, torch, torch.distributed.fsdp, torch.distributed.tensor, yaml
from pydantic import BaseModel, Field

class Warm(BaseModel):  # pydantic imports most of itself with the first model
    field: int = Field(default=1, ge=1)

def surroundings():
    return (dict(os.environ), os.getcwd(), os.listdir("."), threading.active_count(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.random.initial_seed(), torch.get_rng_state().tolist(),
            random.getstate(), str(numpy.random.get_state()), torch.is_grad_enabled(), sys.path[:],
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
            sys.excepthook, torch.cuda.is_initialized(), [entry for entry in warnings.filters])

running = {}

def end_one():
    child, failed = os.wait()
    name = running.pop(child)
    if failed:
        print(f"importing {name} failed", flush=True)

for name in sys.argv[1:]:
    if name == "--":  # it has been imported alone, and takes longer than most
        import glm_accelerate.config.schema
        continue
    if len(running) == os.cpu_count():
        end_one()
    child = os.fork()  # each module is imported on its own, with nothing of ours imported before but that
    if child == 0:
        before = surroundings()
        __import__(name)
        changed = [i for i, (a, b) in enumerate(zip(before, surroundings())) if a != b]
        if changed:
            print(f"{name} changes {changed}", flush=True)
        os._exit(1 if changed else 0)
    running[child] = name
while running:
    end_one()
"""


@pytest.mark.process
def test_every_module_can_be_imported_alone_and_changes_nothing(tmp_path: Path) -> None:
    names = [
        "glm_accelerate." + module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in MODULES
        if module.name != "__init__.py"
    ]
    lowest = [name for name in names if name.split(".")[1] in ("runtime", "config")]
    others = [name for name in names if name not in lowest]
    command = [sys.executable, "-W", "error", "-c", IMPORT_ALL, "glm_accelerate", *lowest, "--", *others]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False, cwd=tmp_path)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("", "", 0)


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and all models inside it."""

    def inside(annotation: object) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
            for field in annotation.model_fields.values():
                yield from inside(field.annotation)
        for part in get_args(annotation):
            yield from inside(part)

    return list(dict.fromkeys(inside(model)))


@pytest.mark.parametrize("section", sections(RunConfig), ids=lambda section: section.__name__)
def test_every_config_field_is_explained(section: type[BaseModel]) -> None:
    assert section.__doc__
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_defaults_live_in_the_schema_only() -> None:
    """A config is frozen and closed, and every section but `model` and `data` may be left out."""
    for section in sections(RunConfig):
        assert section.model_config.get("frozen") is True
        assert section.model_config.get("extra") == "forbid"
    needed = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    assert needed == ["model", "data"]


def test_no_file_knows_where_it_was_written() -> None:
    # In two pieces, so that this file is no offence itself.
    place = re.compile(r"(?<![\w.$}])/(?:wo" + r"rk/|tm" + r"p/w(?:/|\b))")
    skipped = {
        ".git",
        ".venv",
        "venv",
        "build",
        "dist",
        "runs",
        "results",
        "__pycache__",
        ".pytest_cache",
        ".ruff_cache",
    }
    found: list[str] = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if skipped & set(parts) or any(part.endswith(".egg-info") for part in parts) or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{'/'.join(parts)}: {hit[0]}" for hit in place.finditer(text)]
    assert found == []


def test_tests_mirror_the_source() -> None:
    rooms = {
        test.parent.relative_to(ROOT / "tests/unit") for test in (ROOT / "tests/unit").rglob("test_*.py")
    }
    assert rooms
    assert [room.as_posix() for room in sorted(rooms) if not (SRC / room).is_dir()] == []
