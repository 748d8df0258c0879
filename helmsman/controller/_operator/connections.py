"""HTTP servers of the operator that many silent peers do not exhaust."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

MAX_CONNECTIONS = 64


class BoundedThreads(socketserver.ThreadingMixIn):
    """Serves each connection in a thread; a new one ends the oldest when there are too many."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # the peer has ended it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.keep(request)
        super().shutdown_request(request)  # type: ignore[misc]  # of socketserver.BaseServer

    def keep(self, request: socket.socket) -> None:
        """Exempt a connection from the limit, such as one whose peer has shown a token."""
        with self._lock:
            self._open.pop(request, None)
