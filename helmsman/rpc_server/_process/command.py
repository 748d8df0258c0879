"""Engine that runs a module as the worker's child: a server of the user.

It implements ``fork_workers(..., command=...)``.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence

from helmsman.rpc_server.ports import PORTS_VARIABLE

_FIRST_MOMENTS_S = 1.0
"""A child that fails within this time fails the start, which covers most errors, such as a missing
module.
"""
_TAIL_BYTES = 4096


class CommandEngine:
    """Runs ``python -m MODULE ARGUMENTS`` with the worker's environment, devices and log.

    The child ends with the worker. It may bind the worker's leased ports, which it finds in
    HELMSMAN_PORTS as 'port,port'.

    Args:
        command: Module name and arguments, quoted as for a shell. ``{port0}``, ``{port1}``, ...
            are replaced by the leased ports, ``{port}`` by the first one.
        ports: The ports leased to the worker.

    Raises:
        ValueError: The command is empty, or uses more ports than the worker has.
        RuntimeError: The child failed at once.
    """

    def __init__(self, command: str, ports: Sequence[str]) -> None:
        arguments = [_with_ports(part, command, ports) for part in shlex.split(command)]
        if not arguments:
            raise ValueError("the command is empty; expected a module's name and its arguments")
        written = _log_size()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, PORTS_VARIABLE: ",".join(ports)},
        )
        try:
            code = self._process.wait(_FIRST_MOMENTS_S)
        except subprocess.TimeoutExpired:
            return
        if code != 0:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise RuntimeError(
                f"'python -m {shlex.join(arguments)}' ended at once with {how}; it "
                f"wrote:\n{_log_since(written)}"
            )

    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the child's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def destroy(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _with_ports(part: str, command: str, ports: Sequence[str]) -> str:
    def port(match: re.Match[str]) -> str:
        index = int(match[1] or 0)
        if index >= len(ports):
            raise ValueError(
                f"the command {command!r} asks for {match[0]}, but the worker has {len(ports)} "
                "leased ports; "
                f"set SchedulingSpec.port_count to {index + 1}"
            )
        return ports[index]

    return re.sub(r"\{port(\d*)\}", port, part)


def _log_size() -> int:
    """Return the size of the worker's log, which the child shares; 0 if output goes elsewhere."""
    status = os.fstat(2)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _log_since(start: int) -> str:
    try:
        with open("/proc/self/fd/2", "rb") as log:
            if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
                return "(its output went to the script's output)"
            log.seek(max(start, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip() or "(nothing)"
    except OSError:
        return "(its output cannot be read here)"
