"""Raises an exception on SIGINT, SIGTERM and SIGHUP, so that context managers clean up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """A signal requested termination; not an Exception, so that error handlers let it pass."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        """The code that a shell reports for a process ended by this signal."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread at the first SIGINT, SIGTERM or SIGHUP of the block.

    Later signals are ignored, so that a second Ctrl-C cannot interrupt the clean-up. Signals that
    the process ignored from its start, as under nohup, stay ignored. Enter it in the main thread.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(signum: int, _: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signum)

    for number in heeded:
        signal.signal(number, stop)
    # The handlers are not restored: a late signal must not interrupt the interpreter's exit, which
    # follows the block.
    yield
