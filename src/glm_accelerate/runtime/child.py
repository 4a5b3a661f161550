"""Child processes of our own: plain interpreters that find modules where we do, and how one has ended."""

import sys


def python_command(code: str) -> list[str]:
    """The command that runs `code`. No module of the working directory is found by chance."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def how_ended(code: int) -> str:
    """A process's return code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
