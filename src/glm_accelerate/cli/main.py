"""`glm-accelerate VERB ...`: find the verb, parse, run, and turn what happens into one line and an exit code.

Neither torch nor the config schema is imported here or by a verb's `--help`: that has to answer at once.
"""

import argparse
import difflib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NoReturn, Protocol, cast

from glm_accelerate.runtime.env import few_kernels, one_range, share_cores, use_utf8
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.streams import outlive_readers

ROOM, LET = "make room, then run the same again", "let this user read and write there, or name another place"
REFUSED = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: LET, errno.EACCES: LET, errno.EPERM: LET}

VERBS = {
    "demo": "train a tiny GLM on generated data in two minutes, from nothing to a correct answer",
    "doctor": "what this machine has, what is missing, and the command that mends it",
    "data": "lengths, padding waste, what is dropped and why, one sample with its targets",
    "plan": "every value that follows from a config on this machine, and why",
    "bench": "measure training on this machine: steps, operators, data, checkpoints",
    "train": "train; run the same command again to go on where it stopped",
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
    """Its complaints are the user's to mend, in one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, where=self.prog, cure=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; the answer is the exit code."""
    if argv is None:
        use_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    return answer(lambda: _dispatch(words))


def answer(act: Callable[[], int]) -> int:
    """The exit code of `act`, whatever it comes to; what went wrong is said in one line."""
    outlive_readers()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a GBK terminal has no check mark: no reason to end a run
    try:
        code = act()
        sys.stdout.flush()
    except UserError as error:
        if not error.reported:
            _say_error(str(error))
        return ExitCode.USERS_INPUT
    except KeyboardInterrupt:
        _say("stopped")
        return ExitCode.STOPPED
    except Exception as error:  # noqa: BLE001  # the last line of defence: anything here is a bug of ours
        if isinstance(error, OSError) and (said := refused(error)) is not None:
            _say_error(str(said))
            _give_up_output()
            return ExitCode.USERS_INPUT
        traceback.print_exc()
        _say_error("this is a bug in glm-accelerate, not your mistake: please report it with the lines above")
        return ExitCode.OUR_BUG
    return code


def refused(error: OSError) -> UserError | None:
    """What to mend, if a disk or its rights are in the way: full, over quota, read-only, not ours."""
    cure = REFUSED.get(error.errno or 0)
    if cure is None or (cure == LET and error.filename is None):  # of no file: not about a disk
        return None
    return UserError(error.strerror or str(error), where=error.filename, cure=cure)


def verbs() -> dict[str, str]:
    """The verbs that are there, and one line about each."""
    return {verb: line for verb, line in VERBS.items() if find_spec(f"glm_accelerate.cli.{verb}")}


def _dispatch(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return ExitCode.DONE
    if name == "--version":
        sys.stdout.write(f"glm-accelerate {version('glm-accelerate')}\n")
        return ExitCode.DONE
    if name not in verbs():
        close = difflib.get_close_matches(name, list(verbs()), n=1)
        cure = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(verbs())}"
        raise UserError(f"there is no verb `{name}`", cure=cure)
    share_cores()
    one_range()
    few_kernels()
    verb = cast("Verb", import_module(f"glm_accelerate.cli.{name}"))
    parser = Parser(prog=f"glm-accelerate {name}", description=verb.HELP, allow_abbrev=False)
    verb.arguments(parser)
    return verb.run(parser.parse_intermixed_args(rest))


def _help() -> str:
    lines = [f"  {verb:<12} {line}" for verb, line in verbs().items()]
    return "\n".join(
        [
            "usage: glm-accelerate VERB ...",
            "",
            "Train GLM models several times faster than the stock scripts, in less memory.",
            "",
            *lines,
            "",
            "glm-accelerate VERB --help says more. Exit codes: 0 done, 1 our bug, 2 something to mend in",
            "what was given, 75 stopped with everything saved: run it again to go on.",
            "",
        ]
    )


def _say_error(message: str) -> None:
    """One line in red (where the terminal has colours), whatever the message contains."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), (_one_line(message), "red")))


def _one_line(message: str) -> str:
    """A file's name or content may be quoted in a message: it must not move the cursor or forge a line."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)


def _give_up_output() -> None:
    """What still waits to be printed on a full disk: Python would complain of it again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        _to_nowhere()


def _to_nowhere() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    sys.exit(main())
