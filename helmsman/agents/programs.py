"""Agents as programs: each runs in processes of its own, which all end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from helmsman import HelmsmanError

_TAIL = 2000


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program."""

    exit_code: int
    output: str
    """The last characters of its output and errors, together."""


class ProgramFailedError(HelmsmanError):
    """An agent's program exited with an error.

    Args:
        command: The command.
        exit_code: Its exit code; negative for a signal.
        output: The end of its output.
    """

    def __init__(self, command: str, exit_code: int, output: str) -> None:
        super().__init__(
            f"the agent's program {command!r} exited with {exit_code}; expected 0. The end of its "
            f"output:\n{output}"
        )
        self.command, self.exit_code, self.output = command, exit_code, output

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.command, self.exit_code, self.output)


async def run_program(
    command: str | Sequence[str],
    env: Mapping[str, str],
    *,
    timeout: float | None = None,
    cwd: str | Path | None = None,
    max_memory: int | None = None,
    max_output: int = 1 << 20,
) -> ProgramResult:
    """Run a program, and end all its processes when it ends, fails or is cancelled.

    Processes that leave the program's session or whose parent has exited are ended too: a
    supervisor process adopts them.

    Args:
        command: The command, as a shell would split it, or its parts.
        env: Variables that are added to the environment, such as ``session.environment``.
        timeout: Limit in seconds; None for no limit.
        cwd: Folder in which it runs.
        max_memory: Limit of the address space of each of its processes, in bytes.
        max_output: Characters of its output that are kept.

    Returns:
        Its exit code, which is 0, and its output.

    Raises:
        ProgramFailedError: It exited with another code.
        TimeoutError: It did not end within ``timeout``.
        OSError: It cannot be started.
    """
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    supervisor = Path(__file__).with_name("_supervised.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(supervisor), str(max_memory or 0), *parts),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **env},
        cwd=cwd,
        start_new_session=True,
    )
    output = ""
    try:
        async with asyncio.timeout(timeout):
            assert process.stdout is not None
            while data := await process.stdout.read(1 << 16):
                output = (output + data.decode("utf-8", "replace"))[-max_output:]
            code = await process.wait()
    finally:
        await asyncio.shield(_end(process))
    if code:
        raise ProgramFailedError(shlex.join(parts), code, output[-_TAIL:])
    return ProgramResult(exit_code=code, output=output)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the supervisor, which ends all processes below it first."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
