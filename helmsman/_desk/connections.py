"""The operator's HTTP server: for holders of a token, and not exhausted by many silent peers."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import secrets
import socket
import socketserver
import sys
import threading
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any

from helmsman.api.errors import HelmsmanError

MAX_CONNECTIONS = 64
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; frame-ancestors 'none'",
}

Answer = Callable[[str, dict[str, list[str]]], tuple[str, bytes]]
"""Path and query of an address -> type of the content, and content; OSError or HelmsmanError."""


class TokenServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Answers GET requests with a token: a bearer token, or the parameter ``token`` of ``path``.

    Each connection has a thread; a new one ends the oldest one without a token if there are too
    many. With port 0, it listens on any free one. Raises OSError if the port is not free.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, path: str, answer: Answer, *, command: str, token: str = ""
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        self.path, self.answer, self.command = path, answer, command
        self.token = token or secrets.token_urlsafe(24)
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_port}{path}?token={self.token}"
        self.hosts: Collection[str] = ()
        """Allowed values of the Host header; any if empty."""

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
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless the peer has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def keep(self, request: Any) -> None:
        """Exempt a connection from the limit, such as one whose peer has shown a token."""
        with self._lock:
            self._open.pop(request, None)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TokenServer
    timeout = 30.0  # s without a byte from the peer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        values = urllib.parse.parse_qs(query)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path == self.server.path:
            given = given or values.get("token", [""])[0]
        is_here = not self.server.hosts or self.headers.get("Host") in self.server.hosts
        if is_here and hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.server.keep(self.connection)
            try:
                found = 200, *self.server.answer(path, values)
            except (HelmsmanError, OSError) as error:
                found = 404, "text/plain", str(error).encode()
            self._send(*found)
        else:
            text = f"The address needs the token that {self.server.command} printed."
            self._send(403, "text/plain", text.encode())

    def _send(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **_HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: the address has the token."""
