"""The user's script as a child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from helmsman.api.errors import PreflightError

_KILLED_S = 2.0
"""What the kernel may take to end a script that was killed: one that hangs in a file system is left to it."""


class Script:
    """A running script, in the process group of its supervisor: it may read from the terminal, and a Ctrl-C reaches it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ending = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> Script:
        """Start it. Raises: PreflightError when there is no such program."""
        try:
            return cls(await asyncio.create_subprocess_exec(*command, env=environ))
        except OSError as error:
            raise PreflightError(f"the script cannot be started: {command[0]}: {error.strerror}") from error

    async def ended(self) -> int:
        """Wait for its end; returns its exit code, as a shell has it."""
        code = await asyncio.shield(self._ending)
        return code if code >= 0 else 128 - code

    async def stop(self, number: int, grace_s: float) -> None:
        """Hand the signal on, and kill the script if it has not ended within ``grace_s`` seconds."""
        if not (number == signal.SIGINT and _is_from_terminal()):
            self._signal(number)
        await asyncio.wait({self._ending}, timeout=grace_s)
        if not self._ending.done():
            self._signal(signal.SIGKILL)
            await asyncio.wait({self._ending}, timeout=_KILLED_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def _is_from_terminal() -> bool:
    """Whether a Ctrl-C has reached the script already, with the whole process group."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
