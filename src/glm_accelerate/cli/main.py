"""`glm-accelerate VERB ...`: find the verb, parse, run, and turn what happens into one line and an exit code.

Neither torch nor the config schema is imported here or by a verb's `--help`: that has to answer at once.
"""

import argparse
import difflib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn, Protocol, cast

from glm_accelerate.runtime.env import few_kernels, one_range, share_cores, use_utf8
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.streams import outlive_readers

VERBS = {
    "demo": "train a tiny GLM on generated data in two minutes, from nothing to a correct answer",
    "doctor": "what this machine has, what is missing, and the command that mends it",
    "data": "lengths, padding waste, what is dropped and why, one sample with its targets",
    "plan": "every value that follows from a config on this machine, and why",
    "config": "the keys of a config, what each means and takes, and the presets",
    "bench": "measure training on this machine: steps, operators, data, checkpoints",
    "train": "train; run the same command again to go on where it stopped",
    "deploy": "files that run a config on Kubernetes, Kubeflow, Slurm or in containers",
    "watch": "runs as a page in a browser: curves, evaluations, decisions, memory beside the plan",
    "evaluate": "held-out loss and answers of a run, a checkpoint, a snapshot or any model",
    "checkpoints": "list, verify or remove the checkpoints of a run",
    "export": "write a trained model for transformers, vLLM and SGLang",
    "compress": "write a smaller base model: shared projections, thin matrices",
    "convert": "turn old pickled weights into safetensors",
    "chat": "talk to a model",
}


class Verb(Protocol):
    """What a verb's module has. Heavy imports belong inside `run`."""

    HELP: str

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, where=self.prog, cure=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns its exit code."""
    if argv is None:
        use_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _dispatch(words))


def exit_code(act: Callable[[], int]) -> int:
    """The exit code of `act`, whatever happens in it; what goes wrong is reported in one line."""
    outlive_readers()
    try:
        code = act()
        sys.stdout.flush()
    except UserError as error:
        if not error.reported:
            _report(str(error))
        return ExitCode.USERS_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return ExitCode.STOPPED
    except Exception as error:  # noqa: BLE001  # the last line of defence: anything here is a bug of ours
        if isinstance(error, OSError) and (refusal := _refusal(error)) is not None:
            _report(str(refusal))
            _give_up_output()
            return ExitCode.USERS_INPUT
        traceback.print_exc()
        _report("this is a bug in glm-accelerate, not your mistake: please report it with the lines above")
        return ExitCode.OUR_BUG
    return code


def _refusal(error: OSError) -> UserError | None:
    """What to mend, if a disk or its rights are in the way: full, over quota, read-only, not ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = "make room, then run the same again"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename is not None:
        cure = "let this user read and write there, or name another place"
    else:
        return None
    return UserError(error.strerror or str(error), where=error.filename, cure=cure)


def _dispatch(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return ExitCode.DONE
    if name == "--version":
        sys.stdout.write(f"glm-accelerate {version('glm-accelerate')}\n")
        return ExitCode.DONE
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        cure = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(VERBS)}"
        raise UserError(f"there is no verb `{name}`", cure=cure)
    share_cores()
    one_range()
    few_kernels()
    verb = cast("Verb", import_module(f"glm_accelerate.cli.{name}"))
    parser = Parser(prog=f"glm-accelerate {name}", description=verb.HELP, allow_abbrev=False)
    verb.arguments(parser)
    return verb.run(parser.parse_intermixed_args(rest))


def _help() -> str:
    verbs = "\n".join(f"  {verb:<12} {line}" for verb, line in VERBS.items())
    return f"""\
usage: glm-accelerate VERB ...

Train GLM models several times faster than the stock scripts, in less memory.

{verbs}

glm-accelerate VERB --help says more. Exit codes: 0 done, 1 our bug, 2 something to mend in
what was given, 4 machines that differ (doctor --compare), 75 stopped with everything
saved: run it again to go on.
"""


def _report(message: str) -> None:
    """One line in red. Whatever file name or content it quotes cannot move the cursor or add a line."""
    from rich.console import Console

    from glm_accelerate.runtime.screen import say

    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)
    say(Console(stderr=True), ("error: ", "bold red"), (line, "red"))


def _give_up_output() -> None:
    """Drop what still waits to be printed on a full disk: Python would complain of it again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
