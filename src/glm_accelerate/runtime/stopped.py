"""How a run that was asked to stop answers: an orchestrator reads the code, a person the line."""

STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, try again
STOPPED_AT_ONCE = "stopped at once; run the same command again to go on"
