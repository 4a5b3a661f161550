"""`chat PATH`: talk to a model. Answers appear as they come; Ctrl-C ends one, Ctrl-D leaves."""

import argparse
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.generate.chat import Chat

COMMANDS = "/clear forgets the conversation, Ctrl-C ends an answer, Ctrl-D leaves, /help shows this."
HELP = "Talk to a model: a run, a checkpoint, an adapter with its base, or any GLM directory."


def arguments(parser: argparse.ArgumentParser) -> None:
    options.path_arguments(parser)
    parser.add_argument("--ask", metavar="QUESTION", help="one question, answered on stdout")
    parser.add_argument("--system", metavar="TEXT", help="what the conversation opens with")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 picks the likeliest (0)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest only (1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    parser.add_argument(
        "--max-new-tokens", type=options.at_least(1), default=1024, metavar="N", help="longest answer (1024)"
    )


def run(args: argparse.Namespace) -> int:
    from glm_accelerate.assemble.model import open_model
    from glm_accelerate.cli.chosen import chosen
    from glm_accelerate.data.templates import get_template
    from glm_accelerate.data.tokenizers import load_tokenizer
    from glm_accelerate.generate.chat import Chat
    from glm_accelerate.generate.sample import Sampling
    from glm_accelerate.runtime.device import take_device
    from glm_accelerate.runtime.screen import new_console, say

    sampling = Sampling(args.temperature, args.top_p, args.seed)  # its mistakes before the model is read
    weights = chosen(args.path)
    if weights.message:
        say(new_console(stderr=True), weights.message, style="dim")
    base = options.base_from(args)
    opened = open_model(weights.path, base=base, device=take_device(None), merged=True)
    chat = Chat(
        opened.model,
        load_tokenizer(opened.base, opened.template),
        get_template(opened.template),
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        system=args.system,
    )
    console = new_console()
    if args.ask is not None:
        answer(console, chat, _readable(args.ask))
    else:
        converse(console, chat)
    return 0


def converse(console: "Console", chat: "Chat") -> None:
    with suppress(ImportError):
        import_module("readline")  # line editing and history, where there is one
    console.print(COMMANDS, style="dim")
    while True:
        try:
            question = _readable(input("> ")).strip()
        except EOFError:
            console.print()
            return
        except UnicodeDecodeError:
            console.print("that is no text in this terminal's encoding; once more, please", style="red")
            continue
        except KeyboardInterrupt:
            console.print()
            continue
        if question == "/clear":
            chat.clear()
        elif question in ("/help", "/?"):
            console.print(COMMANDS, style="dim")
        elif question:
            try:
                answer(console, chat, question)
            except UserError as error:
                console.print(f"{error}; /clear starts anew", style="red", markup=False)


def _readable(text: str) -> str:
    """Bytes that are no text, as from another encoding, become the sign for that."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def answer(console: "Console", chat: "Chat", question: str) -> None:
    """Print one answer as it comes."""
    from glm_accelerate.cli.data import visible

    pieces = chat.ask(question)
    try:
        for piece in pieces:
            console.file.write(visible(piece))  # as it is: rich would turn tabs into spaces
            console.file.flush()
    except KeyboardInterrupt:
        console.print(" (broken off)", style="dim", end="")
    finally:
        pieces.close()
    console.print()
