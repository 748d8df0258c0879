"""An engine that runs a module as the worker's child, for servers that users bring (``fork_workers(..., command=...)``)."""

from __future__ import annotations

import subprocess
import sys


class CommandEngine:
    """Runs ``python -m MODULE ARGUMENTS`` with the worker's environment, devices and log; it ends with the worker.

    Args:
        command: module name and arguments, split at blanks.
    """

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", *command.split()], stdin=subprocess.DEVNULL)

    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def destroy(self) -> None:
        """SIGTERM, then SIGKILL after 3 s."""
        self._process.terminate()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
