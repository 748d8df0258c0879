"""Runs an agent as a program; its child processes are stopped when it ends."""

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
from helmsman.api import process_guard

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

    Processes that leave the program's session or whose parent has exited are ended too: a guard
    process adopts them.

    Args:
        command: The command, as a shell would split it, or its parts.
        env: Variables that are added to the environment, such as ``session.environment``.
        timeout: Limit in seconds; None for no limit.
        cwd: Folder in which it runs.
        max_memory: Limit of the address space of each of its processes, in bytes.
        max_output: Bytes of its output that are kept, the last ones.

    Returns:
        Its exit code, which is 0, and its output.

    Raises:
        ProgramFailedError: It exited with another code.
        TimeoutError: It did not end within ``timeout``.
        OSError: It cannot be started.
    """
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    limited = parts
    if max_memory is not None:
        limited = ["sh", "-c", f'ulimit -v {max_memory >> 10} && exec "$@"', "sh", *parts]
    report_fd, guards_fd = os.pipe()
    with open(report_fd, "rb") as report:  # noqa: ASYNC230 - read after the guard's end
        try:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", process_guard.__file__),
                *(str(guards_fd), "0", "", "--", *limited),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=cwd,
                pass_fds=[guards_fd],
                process_group=0,
            )
        finally:
            os.close(guards_fd)
        written = bytearray()
        try:
            async with asyncio.timeout(timeout):
                assert guard.stdout is not None
                while data := await guard.stdout.read(1 << 16):
                    written += data
                    del written[:-max_output]
                await guard.wait()
        finally:
            assert guard.stdin is not None
            guard.stdin.close()  # ends all processes that remain
            await asyncio.shield(guard.wait())
            with contextlib.suppress(OSError):
                await guard.stdin.wait_closed()
        numbers = report.read().split()
    output = written.decode("utf-8", "replace")
    # Without a status, the guard itself was killed.
    code = os.waitstatus_to_exitcode(int(numbers[1])) if len(numbers) == 2 else -signal.SIGKILL
    if code:
        raise ProgramFailedError(shlex.join(parts), code, output[-_TAIL:])
    return ProgramResult(exit_code=code, output=output)
