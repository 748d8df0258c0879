"""Ctrl-C, SIGTERM and a terminal that closes as an exception, so that everything ends through its
context manager.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """The process was asked to end. Not an Exception: nothing that handles errors may swallow
    it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        """What a shell reports for a process that this signal ended."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread at the first SIGINT, SIGTERM or SIGHUP of the block.

    Later signals are ignored: an impatient second Ctrl-C must not cut the clean-up short. So are
    those that the process was started to ignore, as nohup has it. To be entered in the main thread.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(signum: int, _: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signum)

    for number in heeded:
        signal.signal(number, stop)
    # Not put back at the end: what comes after the block is the interpreter's exit, which a late
    # signal must not cut short.
    yield
