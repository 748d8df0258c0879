"""An inference server as a child process of the worker: start, output and stop."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman.api import process_guard
from helmsman.api.errors import ServerRequestError, ServerStartError

_PRIVATE = 0o077
"""Mask of the server's files and sockets: for this user only."""
_TAIL_CHUNKS = 64
_CHUNK_BYTES = 4096
_TAIL_BYTES = 8192
_GUARD_GRACE_S = 10.0
"""Seconds for the guard to kill and reap the server's processes, beyond the server's own time."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class ServerProcess:
    """A server process; it runs from construction on.

    Its parent is a guard process (process_guard.py), which stops all of the server's processes when
    the server or the worker ends. The server's output goes to the worker's output; its last part is
    kept.

    Args:
        command: Program and arguments.
        environment: Variables in addition to the worker's.
        stop_timeout_s: Seconds for an orderly stop.
        folder: Folder that is removed with the server, even if the worker is killed; '' for none.
        secret: Text to hide when the command line is shown.
        on_end: Called once, on its own thread, when all processes have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stop_timeout_s: float,
        folder: str = "",
        secret: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.command = shlex.join(command).replace(secret, "***") if secret else shlex.join(command)
        self.pid = 0
        """Process id of the server, which leads a process group; 0 until it is known."""
        self.exit_code: int | None = None
        """Negative for a signal; None while the server runs, or if unknown."""
        self._stop_timeout_s = stop_timeout_s
        self._on_end = on_end
        self._tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_CHUNKS)
        self._started = threading.Event()
        self._ended = threading.Event()
        self._stopping = threading.Lock()
        report_fd, their_report_fd = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", process_guard.__file__),
                    *(str(their_report_fd), f"{stop_timeout_s:g}", folder, "--", *command),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=[their_report_fd],
                # The session stays the worker's, so that the worker's guardian finds the guard.
                process_group=0,
                umask=_PRIVATE,
                bufsize=0,
            )
        except BaseException:
            os.close(report_fd)
            raise
        finally:
            os.close(their_report_fd)
        self._output = threading.Thread(
            target=self._pass_on_output, name="server output", daemon=True
        )
        self._output.start()
        threading.Thread(
            target=self._watch, args=(report_fd,), name="server watch", daemon=True
        ).start()
        self._started.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the server and all its processes have ended."""
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Wait up to ``limit_s`` seconds for the end; return whether it has ended."""
        return self._ended.wait(limit_s)

    def how_it_ended(self) -> str:
        """Describe the end of the server, or that it is running."""
        if not self.has_ended:
            return "it is running"
        if self.exit_code is None:
            return "its guard was killed, and the server with it"
        if self.exit_code < 0:
            return f"it was ended by {signal.Signals(-self.exit_code).name}"
        return f"it ended with exit code {self.exit_code}"

    def log_tail(self) -> str:
        """Return the last part of the server's output."""
        if self.has_ended:
            self._output.join(1.0)  # the last lines usually have the cause
        return b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")

    def wait_ready(
        self, address: str, route: str, headers: Mapping[str, str], limit_s: float
    ) -> None:
        """Wait until the server answers a GET of ``route`` with 200.

        Raises ServerStartError if the server ended, or was not ready within ``limit_s`` seconds; in
        the second case it is still running.
        """
        started = time.monotonic()
        observed, pause_s = "no request sent yet", _LEAST_PAUSE_S

        def failure(reason: str, step: str) -> ServerStartError:
            return ServerStartError(
                command=self.command,
                address=address,
                reason=reason,
                exit_code=self.exit_code,
                elapsed_s=time.monotonic() - started,
                limit_s=limit_s,
                log_tail=self.log_tail(),
                step=step,
            )

        while True:
            remaining_s = limit_s - (time.monotonic() - started)
            if remaining_s <= 0:
                raise failure(
                    f"was still not ready ({observed})",
                    "If its output shows progress, raise ServerConfig.start_timeout_s",
                )
            observed = _probe(address, route, headers, min(remaining_s, 5.0))
            if observed == "":
                return
            if self._ended.wait(min(pause_s * random.uniform(0.5, 1.0), max(0.0, remaining_s))):
                how = self.how_it_ended().removeprefix("it ").removeprefix("its guard ")
                raise failure(
                    how,
                    "See its output; run the command by hand in the worker's environment to "
                    "see all of it",
                )
            pause_s = min(_MOST_PAUSE_S, pause_s * 1.5)

    def stop(self) -> None:
        """Stop all of the server's processes. Idempotent.

        They get SIGTERM, and SIGKILL after ``stop_timeout_s`` seconds.

        Raises:
            TimeoutError: A process is still alive after SIGKILL.
        """
        with self._stopping:
            stdin = self._guard.stdin
            assert stdin is not None
            if not stdin.closed and not self.has_ended:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(b"t")
                if not self.wait(self._stop_timeout_s + _GUARD_GRACE_S):
                    raise TimeoutError(
                        f"the inference server (process {self.pid}) is still alive "
                        f"{_GUARD_GRACE_S:g} s after SIGKILL. A process that is stuck in the "
                        "kernel ends only when its device driver releases it"
                    )
            stdin.close()

    def _pass_on_output(self) -> None:
        stdout = self._guard.stdout
        assert stdout is not None
        with stdout:
            while chunk := os.read(stdout.fileno(), _CHUNK_BYTES):
                self._tail.append(chunk)
                with contextlib.suppress(OSError):
                    # The worker's output may be closed; the server must not block on it.
                    os.write(2, chunk)

    def _watch(self, report_fd: int) -> None:
        with open(report_fd, "rb") as report:
            self.pid = int(report.readline() or 0)
            self._started.set()
            status = report.readline()
        if status:
            self.exit_code = os.waitstatus_to_exitcode(int(status))
        elif self.pid:
            with contextlib.suppress(ProcessLookupError):
                # The guard was killed, and no other process stops the server.
                os.killpg(self.pid, signal.SIGKILL)
        self._guard.wait()
        self._ended.set()
        self._on_end()


def get(address: str, route: str, headers: Mapping[str, str], limit_s: float) -> tuple[int, bytes]:
    """Send a GET request to 'host:port'; return status and body.

    Raises OSError (TimeoutError if it is late) or http.client.HTTPException.
    """
    connection = http.client.HTTPConnection(address, timeout=limit_s)
    try:
        connection.request("GET", route, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def served_model(address: str, headers: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Return the server's description of its model.

    Raises ServerRequestError for an unusable answer, and the errors of ``get``.
    """
    route = "/v1/models"
    status, answer = get(address, route, headers, limit_s)
    model: Any = None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        model = json.loads(answer)["data"][0]
    if status != 200 or not isinstance(model, dict) or "id" not in model:
        raise ServerRequestError(
            address=address,
            route=route,
            status=status,
            answer=answer.decode(errors="replace")[:2000],
            expected="200 with its models",
            step="Check that the server matches ServerConfig.dialect, and that no other program "
            "listens there",
        )
    return model


def _probe(address: str, route: str, headers: Mapping[str, str], limit_s: float) -> str:
    """Return the result of a GET as part of a sentence; '' for status 200."""
    try:
        status, _ = get(address, route, headers, limit_s)
    except TimeoutError:
        return f"GET {route} was not answered within {limit_s:.1f} s"
    except (OSError, http.client.HTTPException) as error:
        return f"GET {route}: {type(error).__name__}: {error}"
    return "" if status == 200 else f"GET {route} was answered with status {status}"
