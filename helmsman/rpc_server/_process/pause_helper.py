"""Helper process that stops and continues a worker, to inject a fault.

Usage: ``pause_helper.py PID FACTOR SECONDS``. The worker runs for 1/FACTOR of the time; ``inf``
stops it. The helper writes a byte to stdout when it is ready, and begins when it reads one from
stdin. It ends at another byte, after SECONDS, or with the worker. It never leaves a living worker
stopped. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_PERIOD_S = 0.1
"""Period of a slowed worker: short beside all timeouts, long beside a process switch."""

_LONGEST_S = 1e6
"""Longest single wait; the system rejects some thousand times more. The process is then stopped
again at once.
"""


def hold(pidfd: int, told: int, factor: float, seconds: float) -> None:
    """Stop or slow a process.

    Args:
        pidfd: The process.
        told: Descriptor that becomes readable when the fault must end.
        factor: The process runs for 1/factor of the time; infinity for not at all.
        seconds: Duration of the fault.
    """

    def is_over(after_s: float) -> bool:
        left_s = deadline - time.monotonic()
        timeout = max(0.0, min(after_s, left_s, _LONGEST_S))
        return (
            bool(select.select([pidfd, told], [], [], timeout)[0]) or time.monotonic() >= deadline
        )

    deadline = time.monotonic() + seconds
    runs_s = _PERIOD_S / factor
    stands_s = float("inf") if runs_s == 0.0 else _PERIOD_S - runs_s
    try:
        while True:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            if is_over(stands_s):
                return
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            if is_over(runs_s):
                return
    except ProcessLookupError:
        return
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def main() -> None:
    pid, factor, seconds = sys.argv[1:]
    pidfd = os.pidfd_open(int(pid))
    if os.getppid() != int(pid):
        return  # the worker ended before pidfd_open, and its pid may have been reused
    os.write(1, b"r")
    ready, _, _ = select.select([pidfd, 0], [], [])
    if 0 in ready and os.read(0, 1) == b"b":
        hold(pidfd, 0, float(factor), float(seconds))


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)  # killing it would leave the worker stopped
    main()
