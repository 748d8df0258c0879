"""The observer of a Ray worker on another machine than the controller: a process beside it, which reads its page (pulse.py).

It answers while the worker's interpreter is stuck, and exits with the worker.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from helmsman.rpc_server.proved_server import ProvedServer
from helmsman.rpc_server.pulse import Pulse, map_page, observe

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from helmsman.rpc_server.observer import main; main(sys.argv[2:])"
)


class _Observer(ProvedServer):
    """Sends one observation to each peer that proves to know the run's key."""

    def __init__(self, listener: socket.socket, key: bytes, page: mmap.mmap, pid: int) -> None:
        super().__init__(listener, key)
        self._page, self._pid = page, pid

    def _serve_requests(self, connection: Connection, peer: socket.socket) -> None:
        peer.sendall(observe(self._page, self._pid))


def start_observer(listener: socket.socket, key: bytes, pulse: Pulse) -> None:
    """Start an observer of this process.

    Args:
        listener: at which it answers; the caller closes its own copy.
        key: the run's key.
        pulse: this process's.
    Raises:
        OSError: No process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(listener.fileno()), str(pulse.fd), str(os.getpid())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno(), pulse.fd],
        start_new_session=True,  # a signal to the worker's group is not for it
    )
    assert process.stdin is not None
    with process.stdin as its_stdin:
        its_stdin.write(key)


def main(argv: list[str]) -> None:
    """Entry point: ``LISTENER_FD PAGE_FD PID``, with the key on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = int(argv[2])
    process = os.pidfd_open(pid)
    key = sys.stdin.buffer.read()
    if os.getppid() != pid:
        return  # the worker ended before
    server = _Observer(socket.socket(fileno=int(argv[0])), key, map_page(int(argv[1])), pid)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    select.select([process], [], [])
