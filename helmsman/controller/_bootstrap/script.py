"""The user's script as a child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman.api.errors import PreflightError
from helmsman.controller._bootstrap.async_utils import StoppedError, first

_ORPHANED_S = 3.0
"""How long the script may go on when the run ends by something else than a signal."""
_KILLED_S = 2.0
"""How long the kernel may take to end a killed script; one that hangs in a file system is left behind."""


async def run_script(command: Sequence[str], environ: Mapping[str, str], stop: asyncio.Future[Any], grace_s: float) -> int:
    """Run the script in the process group of this one: it may read from the terminal, and a Ctrl-C reaches it.

    Args:
        stop: when done, its result is the exception that ends the script. A signal is passed on; others are a SIGTERM to it.
        grace_s: seconds between a signal and the kill.

    Returns: its exit code, as a shell has it.

    Raises: the result of ``stop``, once the script has ended; PreflightError when there is no such program.
    """
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environ)
    except OSError as error:
        raise PreflightError(f"the script cannot be started: {command[0]}: {error.strerror}") from error
    ending = asyncio.ensure_future(process.wait())
    await first(ending, stop)
    if not ending.done():
        why = stop.result()
        number, limit_s = (why.number, grace_s) if isinstance(why, StoppedError) else (signal.SIGTERM, _ORPHANED_S)
        if not (number == signal.SIGINT and _is_from_terminal()):
            _signal(process, number)
        await asyncio.wait({ending}, timeout=limit_s)
        if not ending.done():
            _signal(process, signal.SIGKILL)
            await asyncio.wait({ending}, timeout=_KILLED_S)
        raise why
    code = ending.result()
    return code if code >= 0 else 128 - code


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _is_from_terminal() -> bool:
    """Whether a Ctrl-C has reached the script already, with the whole process group."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
