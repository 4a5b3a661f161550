"""The one error that a person is meant to read (what is wrong, where, the cure), and how processes end."""

import signal
from enum import IntEnum

STOPPED_AT_ONCE = "stopped at once; run the same command again to go on"


class ExitCode(IntEnum):
    """How a process of ours ends."""

    DONE = 0
    OUR_BUG = 1
    USERS_INPUT = 2  # something to mend in what was given
    AFTER_ANOTHER = 3  # a rank, because another one has failed
    DIFFERENT = 4  # `doctor --compare`: two machines are not alike
    STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, try again


class UserError(ValueError):
    """Something in the user's input has to change. The command line prints it and exits with 2."""

    reported = False  # whether another process has printed it already

    def __init__(self, what: str, *, where: object | None = None, cure: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.cure = cure
        place = f"{self.where}: " if self.where else ""
        remedy = f" ({cure})" if cure else ""
        super().__init__(f"{place}{what}{remedy}")


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, what orchestrators send, Slurm's --signal=USR1, and a terminal that closes, unless SIGHUP was
    ignored from the start, as under nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([] if ignored else [signal.SIGHUP])]
