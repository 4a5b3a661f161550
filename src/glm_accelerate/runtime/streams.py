"""Output whose reader goes away (`| head`, a terminal that closes, `>&-`): the work goes on in silence."""

import errno
import io
import os
import sys
from typing import Any, TextIO, cast

NOBODY_READS = (errno.EPIPE, errno.EIO)  # EIO: of a terminal that was closed


class _Forgiving(io.FileIO):
    """Discards everything from the first write on that has no reader."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NOBODY_READS:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """From here on no write to this process's stdout or stderr fails for lack of a reader."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = _forgiving(1, sys.stdout, sys.__stdout__)
    sys.stderr = _forgiving(2, sys.stderr, sys.__stderr__)


def _forgiving(number: int, stream: TextIO, own: TextIO | None) -> TextIO:
    given = cast("TextIO | None", stream)  # None where it was closed at the start
    if given is not own:  # replaced by another
        return stream
    if given is not None:
        given.flush()
    encoding = "utf-8" if given is None else given.encoding
    lines = number == 2 or (given is not None and given.isatty())
    raw = io.BufferedWriter(_Forgiving(number, "w", closefd=False))
    strange = "backslashreplace" if number == 2 else "replace"  # a GBK terminal has no check mark
    return io.TextIOWrapper(raw, encoding=encoding, errors=strange, line_buffering=lines)
