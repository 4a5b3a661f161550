"""How a run is asked to stop, and how it answers: an orchestrator reads the code, a person the line."""

import signal

STOPPED_AT_ONCE = "stopped at once; run the same command again to go on"


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, what orchestrators send, a terminal that closes, and Slurm's --signal=USR1. Who ignores SIGHUP
    from the start, as under nohup, goes on doing so.
    """
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *([] if deaf else [signal.SIGHUP])]
