"""The local adapter: an EngineHost behind a Unix socket that only this user's run can talk to."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import stat
import threading
import time
from typing import Any

from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._host.threads import share_interpreter
from helmsman.rpc_server._process.pulse import Pulse
from helmsman.rpc_server._server.authenticated_server import BACKLOG
from helmsman.rpc_server._server.channel import ChannelServer
from helmsman.rpc_server._wire.messages import WorkerIdentity
from helmsman.rpc_server._wire.stream import fitting_path

NOTICE_S = 25.0
"""How long a worker that is sent SIGTERM goes on. Who preempts a process gives it 30 s, as Kubernetes does, or more."""


def listen(path: str) -> socket.socket:
    """A listening Unix socket at ``path`` that only this user can open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with fitting_path(path) as address:
        listener.bind(address)
    os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
    listener.listen(BACKLOG)
    return listener


def serve_worker(identity: WorkerIdentity, listener: socket.socket, key: bytes) -> int:
    """A local worker's whole life: serve until SHUTDOWN, with engine methods on this thread. Returns the exit code."""
    faulthandler.enable(all_threads=False)  # the thread that crashed; all would push it out of the log's tail
    share_interpreter()
    host = EngineHost(identity, SegmentStore(), pulse=Pulse(f"{identity.run_id}/{identity.worker_id}"))
    host.on_shutdown = host.engine_thread.stop
    _take_notice(host)
    server = ChannelServer(listener, key, host, shares_memory=True)
    server.start()
    host.engine_thread.run()
    server.close()
    host.close()
    host.join()
    return 0


def _take_notice(host: EngineHost) -> None:
    """Have SIGTERM tell that this process is to end: it says so with its health, so that its work can be taken elsewhere, and
    ends ``NOTICE_S`` later or when it is told again. Our own side ends workers by SIGKILL."""
    worker, code = os.getpid(), 128 + signal.SIGTERM

    def told(*_: Any) -> None:
        if os.getpid() != worker:  # a child that an engine has forked, and ends so
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif host.ends_at is not None:
            os._exit(code)
        else:
            last = threading.Timer(NOTICE_S, os._exit, (code,))
            last.daemon = True
            try:
                last.start()
            except RuntimeError:  # no thread is left that could end it later
                os._exit(code)
            host.ends_at = time.monotonic() + NOTICE_S

    signal.signal(signal.SIGTERM, told)
