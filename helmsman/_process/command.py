"""Engine that runs a module of the user, such as a server, as a child process of the worker.

It implements ``fork_workers(..., command=...)``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import re
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from helmsman._base.interfaces import own_addresses
from helmsman._process import guardian
from helmsman._process.ports import PORTS_VARIABLE

_RUNS_S = 1.0
"""Seconds after which a child that names no port counts as started."""
_POLL_S = 0.05
_CONNECT_S = 1.0
_WATCH_S = 0.2
_TAIL_BYTES = 4096
_PORT = re.compile(r"\{port(\d*)\}")
_TAG_VARIABLE = "HELMSMAN_COMMAND_TAG"
"""Environment variable of the child and of the processes that it starts; unique per child."""


class CommandEngine:
    """Runs ``python -m MODULE ARGUMENTS`` with the worker's environment, devices and log.

    The child ends with the worker, and the processes that it started end with it, unless it was
    allowed to finish and has. It may bind the worker's leased ports, which it finds in
    HELMSMAN_PORTS as 'port,port'. The constructor returns when the child has started.

    Args:
        command: Module name and arguments, quoted as for a shell. ``{port0}``, ``{port1}``, ...
            are replaced by the leased ports, ``{port}`` by the first one.
        ports: The ports leased to the worker.
        ready: Condition under which the child counts as started; see SchedulingSpec.cmd_ready.
        node: Address of the worker's node.
        limit_s: Longest wait for a port or a check, in seconds.

    Raises:
        ValueError: The command is empty, or uses more ports than the worker has.
        RuntimeError: The child ended before it had started, or did not start in time.
    """

    def __init__(
        self,
        command: str,
        ports: Sequence[str],
        ready: float | str | None,
        node: str,
        limit_s: float,
    ) -> None:
        arguments = [_with_ports(part, command, ports) for part in shlex.split(command)]
        if not arguments:
            raise ValueError("the command is empty; expected a module's name and its arguments")
        self._shown = f"'python -m {shlex.join(arguments)}'"
        self._address = node
        started = time.monotonic()
        named = _PORT.search(command)
        self._may_finish = False
        has_started: Callable[[], bool]
        if isinstance(ready, str):
            check, numbers = pkgutil.resolve_name(ready), [int(port) for port in ports]
            expected, has_started = f"{ready}({numbers}) returns True", lambda: bool(check(numbers))
        elif ready is None and named is not None:
            port = int(ports[int(named[1] or 0)])
            expected = f"port {port} accepts connections"
            has_started = functools.partial(self._finds, port)
        else:
            runs_s = _RUNS_S if ready is None else ready
            self._may_finish = True
            expected = f"it has run for {runs_s:g} s"
            has_started = lambda: time.monotonic() - started >= runs_s  # noqa: E731
        written = _log_size()
        self._tag = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, PORTS_VARIABLE: ",".join(ports), _TAG_VARIABLE: self._tag},
            start_new_session=True,
        )
        self._watcher = threading.Thread(target=self._watch, name="helmsman-command", daemon=True)
        try:
            self._watcher.start()
            is_late = False
            while (problem := self.failure()) is None and not has_started() and not is_late:
                time.sleep(_POLL_S)
                is_late = time.monotonic() - started > limit_s
            if problem is not None or is_late:
                raise RuntimeError(
                    f"{problem or f'{self._shown} was not ready within {limit_s:g} s'}; it counts "
                    f"as ready when {expected}. Set SchedulingSpec.cmd_ready, or raise "
                    f"Timeouts.create_engine_s; it wrote:\n{_log_since(written)}"
                )
        except BaseException:
            self.destroy()
            raise

    def failure(self) -> str | None:
        """Return why the child no longer runs, for the worker's health; None if all is well."""
        code = self.poll()
        if code is None or (code == 0 and self._may_finish):
            return None
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{self._shown} has ended with {how}"

    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the child's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def endpoint(self) -> tuple[str, int | None]:
        """Return the address at which the child's port accepts connections, and the exit code.

        The address is the node's where it accepts, or another one of this machine.
        """
        return self._address, self.poll()

    def destroy(self) -> None:
        self._may_finish = False
        self._process.terminate()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        """Wait for the child to end, then end the processes that it started."""
        while self.poll() is None:
            _reap_orphans(self.pid())
            time.sleep(_WATCH_S)
        if self.failure() is not None:
            guardian.end_family(self.pid(), self._tag, variable=_TAG_VARIABLE)
            _reap_orphans(self.pid())

    def _finds(self, port: int) -> bool:
        """Whether the port accepts connections at the node's address or another of this machine."""
        if _accepts(port, "localhost") or _accepts(port, self._address):
            return True
        # A server may bind the machine's address alone, while the node's is the loopback.
        for host in own_addresses():
            if _accepts(port, host):
                self._address = host
                return True
        return False


def _with_ports(part: str, command: str, ports: Sequence[str]) -> str:
    def port(match: re.Match[str]) -> str:
        index = int(match[1] or 0)
        if index >= len(ports):
            raise ValueError(
                f"the command {command!r} asks for {match[0]}, but the worker has {len(ports)} "
                f"leased ports; set SchedulingSpec.port_count to {index + 1}"
            )
        return ports[index]

    return _PORT.sub(port, part)


def _accepts(port: int, host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
        return True
    return False


def _reap_orphans(session: int) -> None:
    """Reap processes of a session that this process has adopted, as init would.

    A worker inherits the orphans of its descendants. A program that waits until it has ended one
    would wait in vain.
    """
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in map(int, file.read().split()):
            row = guardian.process_of(pid)
            if row is not None and row.state == "Z" and row.session == session != pid:
                os.waitpid(pid, os.WNOHANG)


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
