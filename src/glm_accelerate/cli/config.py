"""`config [SECTION | SECTION.KEY | preset:NAME | FILE]`: the keys of a config, what each means and takes, its
default and the presets, as YAML that can be copied.
"""

import argparse
import sys
from difflib import get_close_matches

from glm_accelerate.runtime.errors import ExitCode, UserError

HELP = (
    "Show a config's sections and presets, one section's keys, or a whole file with a comment for each key."
)
LANGUAGES = ("en", "zh")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        help="a section, a key as train.steps, preset:NAME, or a YAML file; else an overview",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace what the file says"
    )
    parser.add_argument("--lang", choices=LANGUAGES, default="en", help="language of the comments (en)")
    parser.add_argument("--schema", action="store_true", help="the JSON Schema, for editors")
    parser.add_argument(
        "--tables", action="store_true", help="all keys as Markdown, as docs/config.md has them"
    )


def run(args: argparse.Namespace) -> int:
    """Print it."""
    import json

    from glm_accelerate.config.load import json_schema
    from glm_accelerate.config.reference import as_tables

    if args.tables:
        sys.stdout.write(as_tables(args.lang))
    elif args.schema:
        sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
    elif args.what is None:
        sys.stdout.write(_overview(args.lang))
    else:
        sys.stdout.write(_section(args) or _whole(args))
    return ExitCode.DONE


def _overview(language: str) -> str:
    from glm_accelerate.config.load import preset_names
    from glm_accelerate.config.reference import sections

    lines = [
        f"  {section.name:<12} {section.about}" for section in sections("zh" if language == "zh" else "en")
    ]
    presets = "\n".join(f"  {name}" for name in preset_names())
    return f"""\
Sections (their keys: glm-accelerate config SECTION):
{chr(10).join(lines)}

Presets (as a file to change: glm-accelerate config preset:NAME > my.yaml):
{presets}

Any key may follow a config on the command line: glm-accelerate train my.yaml train.steps=100
"""


def _section(args: argparse.Namespace) -> str | None:
    """A section, or one key of it; None if `what` is neither."""
    from dataclasses import replace

    from glm_accelerate.config.reference import as_yaml, sections

    name, _, key = args.what.partition(".")
    known = {section.name: section for section in sections(args.lang)}
    if name not in known or args.overrides:
        return None
    section = known[name]
    if key:
        chosen = tuple(each for each in section.keys if each.name == key)
        if not chosen:
            close = get_close_matches(key, [each.name for each in section.keys], n=1)
            cure = f"did you mean `{name}.{close[0]}`?" if close else f"glm-accelerate config {name}"
            raise UserError(f"there is no key `{args.what}`", cure=cure)
        section = replace(section, keys=chosen)
    return as_yaml(section, language=args.lang)


def _whole(args: argparse.Namespace) -> str:
    """A preset or a file: what it sets, and all other keys as comments."""
    from glm_accelerate.config.load import PRESET, load_config
    from glm_accelerate.config.reference import as_yaml, sections

    known = [section.name for section in sections()]
    if not args.what.startswith(PRESET) and "/" not in args.what and "." not in args.what:
        close = get_close_matches(args.what, known, n=1)
        cure = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
        raise UserError(f"there is no section `{args.what}`", cure=cure)
    values = load_config(args.what, args.overrides).model_dump(mode="json")
    return "\n".join(as_yaml(section, values[section.name], args.lang) for section in sections(args.lang))
