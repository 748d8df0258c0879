"""Authentication of incoming connections on an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from helmsman._wire.auth import HANDSHAKE_LIMIT_S, authenticate_connector
from helmsman._wire.stream import Stream, tune_tcp
from helmsman._wire.tls import ServerTls
from helmsman.api.errors import ProtocolError
from helmsman.api.refusals import RefusalLog

BACKLOG = 1024
"""Length of a listener's queue of connections in the kernel."""
MAX_PENDING = 256
"""Maximum number of pending handshakes."""
MAX_PENDING_OF_HOST = 64
"""Maximum number of pending handshakes per peer address."""

_ACCEPT_PAUSE_S = 0.1


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
