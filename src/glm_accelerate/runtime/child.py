"""Child processes of our own: how they start, how they have ended, and that they die with their parent.

Without torch: writers and scorers never load it.
"""

import ctypes
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # prctl


def python_command(code: str) -> list[str]:
    """The command that runs `code`. Modules are searched where we do, never in the working directory."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def how_ended(code: int) -> str:
    """A process's return code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """The system kills this process when the thread that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
