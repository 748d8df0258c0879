"""An engine that runs a module as the worker's child, for servers that users bring (``fork_workers(..., command=...)``)."""

from __future__ import annotations

import subprocess
import sys

from helmsman.api.errors import EngineCreationError


class CommandEngine:
    """Runs ``python -m MODULE ARGUMENTS`` with the worker's environment, devices and log; it ends with the worker.

    Args:
        command: module name and arguments, split at blanks.
        worker_id: the worker, for messages.
    """

    def __init__(self, command: str, worker_id: str) -> None:
        self._worker_id = worker_id
        self._command = [sys.executable, "-m", *command.split()]
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise EngineCreationError(
                worker_id=worker_id,
                engine_name=worker_id,
                method="__init__",
                remote_type=type(error).__name__,
                remote_message=str(error),
                remote_traceback=f"while starting {' '.join(self._command)}",
            ) from error

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
