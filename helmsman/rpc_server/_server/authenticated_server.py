"""Server that gives each authenticated connection a thread.

All handshakes share one event loop. Silent or slow peers cost a file descriptor for a few seconds,
and no thread.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import select
import socket
import ssl
import sys
import threading

from helmsman._base.loops import start_loop
from helmsman._wire.door import Door
from helmsman._wire.stream import WOULD_BLOCK, Stream
from helmsman._wire.tls import ServerTls
from helmsman._wire.wire import FrameReader, pack_length
from helmsman.api.refusals import RefusalLog

_CLOSE_S = 1.0
_READ_BYTES = 1 << 16


class _Tls:
    """Reads and blocking writes of a TLS socket by two threads at a time.

    OpenSSL does not allow two threads in one connection. The socket stays non-blocking, and a lock
    guards each operation. No thread holds the lock while it waits for the peer.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def recv(self, size: int, _: int) -> bytes:
        with self._lock:
            return self._socket.recv(size)

    def sendall(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            with self._lock, contextlib.suppress(*WOULD_BLOCK):
                unsent = unsent[self._socket.send(unsent) :]
                continue
            self._writable.poll()


class Connection:
    """Whole messages over an authenticated socket; one thread reads at a time, and many write."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._messages: collections.deque[bytes] = collections.deque()
        self._sending = threading.Lock()
        self._tls = _Tls(sock) if isinstance(sock, ssl.SSLSocket) else None
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        if self._tls is None:
            sock.setblocking(True)

    def receive(self) -> bytes:
        while not self._messages:
            self._messages.extend(self.receive_now())
            if not self._messages:
                self._readable.poll()
        return self._messages.popleft()

    def receive_now(self) -> list[bytes]:
        """Return the messages that have arrived, without a wait. Raises EOFError at the end."""
        messages = list(self._messages)
        self._messages.clear()
        try:
            data = (self._tls or self._socket).recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except WOULD_BLOCK:
            return messages
        if not data:
            raise EOFError
        return messages + self._reader.feed(data)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        self.send_framed(pack_length(len(message)) + message)

    def send_framed(self, data: bytes) -> None:
        with self._sending:
            (self._tls or self._socket).sendall(data)

    def abort(self) -> None:
        """Make reading and writing threads fail; only the reading thread calls ``close``."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would drop the TLS state that those threads use.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


class AuthenticatedServer(abc.ABC):
    """Serves each authenticated connection to a listening socket on a thread of its own.

    Args:
        listener: Listening socket, which close() closes.
        key: The run's key.
        tls: The listener's TLS; None for plain connections.
    """

    def __init__(self, listener: socket.socket, key: bytes, tls: ServerTls | None = None) -> None:
        self._listener = listener
        self._key = key
        self._tls = tls
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def _serve_requests(self, connection: Connection) -> None:
        """Serve an authenticated connection until it ends."""

    def start(self) -> None:
        self._loop, self._thread = start_loop("accept", run=self._run)

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            self._listener.close()
            return
        with contextlib.suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_S)  # until it has reported refused connections

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._accept())

    async def _accept(self) -> None:
        door = Door(
            self._listener,
            self._key,
            tls=self._tls,
            admit=self._admit,
            refusals=RefusalLog(_report),
        )
        try:
            await self._closing.wait()
        finally:
            door.close()

    def _admit(self, stream: Stream, host: str) -> None:
        sock = stream.detach()
        try:
            threading.Thread(
                target=self._serve, args=(sock,), name="connection", daemon=True
            ).start()
        except RuntimeError as error:
            # Limit on threads: this connection is lost, but later ones may be served.
            _report(f"closed a connection from {host}: no thread can be started for it ({error})")
            sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection. A peer that violates the protocol loses only its connection."""
        connection = Connection(sock)
        try:
            self._serve_requests(connection)
        finally:
            connection.close()


def _report(line: str) -> None:
    print(f"helmsman: {line}", file=sys.stderr, flush=True)
