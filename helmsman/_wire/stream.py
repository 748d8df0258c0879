"""Bytes over a non-blocking socket on an event loop, plain or TLS.

asyncio's own streams do not return their socket, which a channel needs after authentication.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Any

_BACKLOG_FULL_PAUSE_S = 0.01
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 15,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 120_000,
}

WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Raised by a non-blocking socket, plain or TLS, that must wait for its peer."""


class Stream:
    """A connected socket for one reader.

    Args:
        sock: Becomes non-blocking, and is closed with the stream.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.is_open = True
        self._received = bytearray()
        self._unsent = bytearray()
        self._sent = asyncio.Event()
        """Set when everything is sent, and when the stream is closed."""
        self._waiting: asyncio.Future[None] | None = None
        """Resolved when the socket is ready for the reader, or closed."""

    async def read(self, size: int) -> bytes:
        """Read exactly ``size`` bytes. A cancelled call loses none.

        Raises:
            EOFError: The peer closed the connection.
            OSError: The connection failed, or was closed here.
        """
        while len(self._received) < size:
            self._require_open()
            try:
                data = self.socket.recv(size - len(self._received))
            except WOULD_BLOCK:
                await self._ready(for_writing=False)
                continue
            if not data:
                raise EOFError
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def write(self, data: bytes) -> None:
        """Send without waiting. A connection error closes the stream, and its reader raises."""
        if not self.is_open:
            return
        had_unsent = bool(self._unsent)
        self._unsent += data
        if not had_unsent:
            self._sent.clear()
            self._send()
            if self._unsent and self.is_open:
                asyncio.get_running_loop().add_writer(self.socket, self._send)

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except WOULD_BLOCK:
            return
        except OSError:
            self.close()
            return
        asyncio.get_running_loop().remove_writer(self.socket)
        self._sent.set()

    async def drain(self) -> None:
        if self._unsent:
            await self._sent.wait()

    async def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Perform a TLS handshake. The stream must have no unsent bytes.

        Raises:
            OSError: The handshake failed, usually with ssl.SSLError.
        """
        self._require_open()
        wrapped = context.wrap_socket(
            self.socket, server_side=server_side, do_handshake_on_connect=False
        )
        self.socket = wrapped
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await self._ready(for_writing=False)
            except ssl.SSLWantWriteError:
                await self._ready(for_writing=True)
            else:
                return

    def detach(self) -> socket.socket:
        assert not self._unsent
        assert not self._received
        self.is_open = False
        return self.socket

    def close(self) -> None:
        """Close at once and drop unsent bytes; a reader gets ConnectionAbortedError. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        if self.socket.fileno() >= 0:  # negative if wrapping it for TLS failed
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.socket)
            loop.remove_writer(self.socket)
        self.socket.close()
        self._sent.set()
        if self._waiting is not None:
            _settle(self._waiting)

    def _require_open(self) -> None:
        if not self.is_open:
            raise ConnectionAbortedError("the connection was closed by this end")

    async def _ready(self, *, for_writing: bool) -> None:
        loop = asyncio.get_running_loop()
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if for_writing
            else (loop.add_reader, loop.remove_reader)
        )
        ready = self._waiting = loop.create_future()
        add(self.socket, _settle, ready)
        try:
            await ready
        finally:
            if self.is_open:
                remove(self.socket)
        self._require_open()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def open_unix(address: str, limit_s: float) -> Stream:
    """Connect to a Unix socket within ``limit_s`` seconds; abstract ones begin with a null byte.

    Raises:
        OSError: Connecting failed.
    """
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                raw.connect(address)
            except BlockingIOError:
                # The listener's backlog is full; a non-blocking Unix socket does not queue.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_BACKLOG_FULL_PAUSE_S)
            else:
                return Stream(raw)
    except BaseException:
        raw.close()
        raise


def tune_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and detect a lost connection within two minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def open_tcp(address: tuple[Any, ...], limit_s: float) -> Stream:
    """Connect to a numeric address and port, in the form that getaddrinfo returns.

    Raises:
        OSError: Connecting failed; TimeoutError after ``limit_s`` seconds.
    """
    raw = socket.socket(
        socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        raw.setblocking(False)
        tune_tcp(raw)
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(raw, address)
    except TimeoutError as error:
        raw.close()
        raise TimeoutError(f"no connection within {limit_s:g} s") from error
    except BaseException:
        raw.close()
        raise
    return Stream(raw)
