"""Authentication of incoming connections, and a server that gives each one a thread.

All handshakes share one event loop. Silent or slow peers cost a file descriptor for a few seconds,
and no thread.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import os
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable

from helmsman.api.errors import ProtocolError
from helmsman.api.refusals import RefusalLog
from helmsman.rpc_server._host.threads import start_loop
from helmsman.rpc_server._wire.auth import HANDSHAKE_LIMIT_S, authenticate_connector
from helmsman.rpc_server._wire.stream import WOULD_BLOCK, Stream, tune_tcp
from helmsman.rpc_server._wire.tls import ServerTls
from helmsman.rpc_server._wire.wire import FrameReader, pack_length

BACKLOG = 1024
"""Length of a listener's queue of connections in the kernel."""
MAX_PENDING = 256
"""Maximum number of pending handshakes."""
MAX_PENDING_OF_HOST = 64
"""Maximum number of pending handshakes per peer address."""

_ACCEPT_PAUSE_S = 0.1
_CLOSE_S = 1.0
_READ_BYTES = 1 << 16


class Door:
    """Accepts and authenticates connections on the running event loop.

    When too many handshakes are pending, of one address or in total, a new connection evicts the
    one whose last step was longest ago. Silent peers therefore give way to peers of this run,
    whose handshake takes a few round trips.

    Args:
        listener: Listening socket, which close() closes.
        key: The run's key.
        tls: The listener's TLS; None for plain connections.
        admit: Called with each authenticated connection and its peer's address.
        refusals: Log of refused connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        *,
        tls: ServerTls | None,
        admit: Callable[[Stream, str], None],
        refusals: RefusalLog,
    ) -> None:
        self._listener = listener
        self._key = key
        self._tls = tls
        self._admit = admit
        self._refusals = refusals
        self._pending: dict[asyncio.Task[None], str] = {}
        """Peer address of each pending handshake, ordered by its last step, oldest first."""
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._pause is not None:
            self._pause.cancel()
        for task in list(self._pending):
            task.cancel()
        self._refusals.close()

    def _accept(self) -> None:
        # One at a time, so that pending handshakes progress however fast connections arrive.
        try:
            peer, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files
            self._refusals.note(f"could not be accepted: {error.strerror}", "this network")
            self._evict(list(self._pending))
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)
            return
        host = "this machine"
        if peer.family != socket.AF_UNIX:
            host = address[0]
            tune_tcp(peer)
        if not _is_allowed(peer):
            self._refuse("belongs to another user", host)
            peer.close()
            return
        if len(self._pending) >= MAX_PENDING:
            self._evict(list(self._pending))
        of_host = [task for task, each in self._pending.items() if each == host]
        if len(of_host) >= MAX_PENDING_OF_HOST:
            self._evict(of_host)
        stream = Stream(peer)
        task = self._loop.create_task(self._authenticate(stream, host))
        self._pending[task] = host

        def end(task: asyncio.Task[None]) -> None:
            self._pending.pop(task, None)
            if task.cancelled():  # possibly before it began
                stream.close()

        task.add_done_callback(end)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _evict(self, candidates: list[asyncio.Task[None]]) -> None:
        if candidates:
            host = self._pending.pop(candidates[0])
            candidates[0].cancel()
            self._refuse(
                "had not proved that it belongs to this run when newer connections evicted it",
                host,
            )

    def _refuse(self, reason: str, host: str) -> None:
        self._refusals.note(f"was refused: it {reason}", host)

    async def _authenticate(self, stream: Stream, host: str) -> None:
        task = asyncio.current_task()
        assert task is not None

        def step() -> None:
            if task in self._pending:
                self._pending[task] = self._pending.pop(task)

        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                await authenticate_connector(stream, self._key, self._tls, step)
        except ProtocolError as error:
            stream.close()
            self._refuse(str(error), host)
        except TimeoutError:
            stream.close()
            self._refuse(
                f"did not prove that it belongs to this run within {HANDSHAKE_LIMIT_S:g} s", host
            )
        except BaseException:
            stream.close()
            raise
        else:
            self._admit(stream, host)


def _is_allowed(peer: socket.socket) -> bool:
    """Whether the peer may authenticate: on a Unix socket it must be a process of this user."""
    if peer.family != socket.AF_UNIX:
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


class _Tls:
    """Blocking reads and writes of a TLS socket by two threads at a time.

    OpenSSL does not allow two threads in one connection. The socket stays non-blocking, and a lock
    guards each operation. No thread holds the lock while it waits for the peer.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def recv(self, size: int) -> bytes:
        while True:
            with self._lock:
                has_more = self._socket.pending() > 0
            if not has_more:  # a read would raise now, which is slow
                self._readable.poll()
            with self._lock, contextlib.suppress(*WOULD_BLOCK):
                return self._socket.recv(size)

    def sendall(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            with self._lock, contextlib.suppress(*WOULD_BLOCK):
                unsent = unsent[self._socket.send(unsent) :]
                continue
            self._writable.poll()


class Connection:
    """Whole messages over an authenticated socket, for one reading and many writing threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._messages: collections.deque[bytes] = collections.deque()
        self._sending = threading.Lock()
        self._tls = _Tls(sock) if isinstance(sock, ssl.SSLSocket) else None
        if self._tls is None:
            sock.setblocking(True)

    def receive(self) -> bytes:
        while not self._messages:
            data = (self._tls or self._socket).recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._messages.extend(self._reader.feed(data))
        return self._messages.popleft()

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
