"""An inference server as a child of the worker: its start, its output, its end."""

from __future__ import annotations

import collections
import contextlib
import http.client
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from helmsman.api.errors import ServerStartError
from helmsman.engines._server import guard as server_guard

_TAIL_CHUNKS = 64
_CHUNK_BYTES = 4096
_TAIL_BYTES = 8192
_GUARD_GRACE_S = 10.0
"""For the guard to kill and reap what the server has started, beyond the server's own time."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class ServerProcess:
    """A server, running from its construction on.

    It is the child of a guard (guard.py), which ends all that it has started with it, and it with
    the worker, however that ends. Its output goes to the worker's; the last of it is kept.

    ``environment`` is added to the worker's own. ``folder`` is removed with the server, even if the
    worker is killed; ``secret`` is not shown in the command line; ``on_end`` is called once when
    nothing is left, on a thread of its own.
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
        """Of the server, which leads a process group; 0 until it is known."""
        self.exit_code: int | None = None
        """Negative for a signal; None while it runs, and when it is unknown."""
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
                    *(sys.executable, "-I", "-S", server_guard.__file__),
                    *(str(their_report_fd), f"{stop_timeout_s:g}", folder, "--", *command),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=[their_report_fd],
                # of the worker's session still, so that the worker's own guardian knows it
                process_group=0,
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
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        return self._ended.wait(limit_s)

    def how_it_ended(self) -> str:
        if not self.has_ended:
            return "it is running"
        if self.exit_code is None:
            return "its guard was killed, and it with it"
        if self.exit_code < 0:
            return f"it was ended by {signal.Signals(-self.exit_code).name}"
        return f"it ended with exit code {self.exit_code}"

    def log_tail(self) -> str:
        if self.has_ended:
            self._output.join(1.0)  # what it wrote last is the most telling
        return b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")

    def wait_ready(
        self, address: str, route: str, headers: Mapping[str, str], limit_s: float
    ) -> None:
        """Wait until the server answers a GET of this route with 200. Raises: ServerStartError when
        it ended before, or did not within ``limit_s`` seconds; it is still running in the second
        case.
        """
        started = time.monotonic()
        observed, pause_s = "nothing was asked yet", _LEAST_PAUSE_S

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
                    "If its output shows that it was on its way, raise "
                    "ServerConfig.start_timeout_s",
                )
            observed = _probe(address, route, headers, min(remaining_s, 5.0))
            if observed == "":
                return
            if self._ended.wait(min(pause_s * random.uniform(0.5, 1.0), max(0.0, remaining_s))):
                how = self.how_it_ended().removeprefix("it ").removeprefix("its guard ")
                raise failure(
                    how,
                    "Its output says why; run the command by hand in the worker's environment to "
                    "see all of it",
                )
            pause_s = min(_MOST_PAUSE_S, pause_s * 1.5)

    def stop(self) -> None:
        """End it and all that it has started: SIGTERM, SIGKILL after ``stop_timeout_s`` seconds.
        Idempotent.

        Raises:
            TimeoutError: Something of it is left, although it was killed.
        """
        with self._stopping:
            stdin = self._guard.stdin
            assert stdin is not None
            if not stdin.closed and not self.has_ended:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(b"t")
                if not self.wait(self._stop_timeout_s + _GUARD_GRACE_S):
                    raise TimeoutError(
                        f"the inference server (process {self.pid}) is not gone "
                        f"{_GUARD_GRACE_S:g} s after it was killed; what "
                        "is stuck in the kernel ends with its device's driver"
                    )
            stdin.close()

    def _pass_on_output(self) -> None:
        stdout = self._guard.stdout
        assert stdout is not None
        with stdout:
            while chunk := os.read(stdout.fileno(), _CHUNK_BYTES):
                self._tail.append(chunk)
                with contextlib.suppress(OSError):
                    # the worker's own output may be closed; the server must go on
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
                # the guard was killed, and no other process ends the server
                os.killpg(self.pid, signal.SIGKILL)
        self._guard.wait()
        self._ended.set()
        self._on_end()


def get(address: str, route: str, headers: Mapping[str, str], limit_s: float) -> tuple[int, bytes]:
    """Status and body of an answer to a GET. Raises: OSError (TimeoutError too),
    http.client.HTTPException.
    """
    connection = http.client.HTTPConnection(address, timeout=limit_s)
    try:
        connection.request("GET", route, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _probe(address: str, route: str, headers: Mapping[str, str], limit_s: float) -> str:
    """What a GET of the route gave, as part of a sentence; '' for 200."""
    try:
        status, _ = get(address, route, headers, limit_s)
    except TimeoutError:
        return f"GET {route} was not answered within {limit_s:.1f} s"
    except (OSError, http.client.HTTPException) as error:
        return f"GET {route}: {type(error).__name__}: {error}"
    return "" if status == 200 else f"GET {route} was answered with status {status}"
