"""A process that does not outlive whoever started it. Without torch: writers and scorers have none."""

import ctypes
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # prctl


def end_with_parent() -> None:
    """The system kills us when the thread that started us is gone, whatever we are doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
