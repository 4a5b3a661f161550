import signal

from glm_accelerate.training.stop import StopRequest


def test_the_first_signal_is_the_reason() -> None:
    """A rank hears Ctrl-C, and then the launcher's SIGTERM."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason(1) == "SIGINT"
