"""Observer process: reads a Ray worker's heartbeats in shared memory for a driver elsewhere.

It runs on the worker's machine and exits with the worker.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys

from helmsman._process.pulse import Pulse, map_page, observe
from helmsman._process.title import set_title
from helmsman._wire.auth import connect
from helmsman._wire.stream import Stream
from helmsman._wire.tls import ServerTls, server_tls
from helmsman._wire.wire import LENGTH_BYTES, unpack_length
from helmsman.rpc_server._server.authenticated_server import AuthenticatedServer, Connection

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from helmsman.rpc_server._server.observer import main; main(sys.argv[2:])"
)


class _Observer(AuthenticatedServer):
    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        page: mmap.mmap,
        pid: int,
        *,
        tls: ServerTls | None,
    ) -> None:
        super().__init__(listener, key, tls)
        self._page, self._pid = page, pid

    def _serve_requests(self, connection: Connection) -> None:
        connection.send(observe(self._page, self._pid))


async def ask_observer(address: tuple[str, int], key: bytes, limit_s: float, *, tls: bool) -> bytes:
    """Request an observation, for ``pulse.read``, from an observer.

    Args:
        address: The observer's numeric host and port.
        key: The run's key.
        limit_s: Time limit in seconds.
        tls: Whether the connection uses TLS.

    Raises:
        OSError: Connecting failed; TimeoutError after ``limit_s`` seconds.
        EOFError: The observer closed the connection.
        ProtocolError: The listener is not of this run.
    """
    async with asyncio.timeout(limit_s):
        stream = Stream(await connect(address, key, limit_s, tls=tls))
        try:
            return await stream.read(unpack_length(await stream.read(LENGTH_BYTES)))
        finally:
            stream.close()


def start_observer(listener: socket.socket, key: bytes, pulse: Pulse, *, tls: bool) -> None:
    """Start an observer of this process; the caller closes its own copy of ``listener``.

    Raises:
        OSError: The process cannot be started.
    """
    arguments = [str(listener.fileno()), str(pulse.fd), str(os.getpid()), "tls" if tls else "plain"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *arguments],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno(), pulse.fd],
        start_new_session=True,  # signals to the worker's group must not reach it
    )
    assert process.stdin is not None
    with process.stdin as its_stdin:
        its_stdin.write(key)


def main(argv: list[str]) -> None:
    """Entry point: ``LISTENER_FD PAGE_FD PID tls|plain``, with the key on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = int(argv[2])
    set_title(f"helmsman: observer of pid {pid}")
    process = os.pidfd_open(pid)
    key = sys.stdin.buffer.read()
    if os.getppid() != pid:
        return  # the worker has already exited
    listener = socket.socket(fileno=int(argv[0]))
    server = _Observer(
        listener, key, map_page(int(argv[1])), pid, tls=server_tls() if argv[3] == "tls" else None
    )
    server.start()
    select.select([process], [], [])
