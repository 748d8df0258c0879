"""Entrance of a server: limits on connections, and first of all on peers that have shown no key."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec

from helmsman.api.refusals import RefusalLog

BACKLOG = 1024
"""Length of a listener's queue of connections in the kernel."""

_ACCEPT_PAUSE_S = 0.1
_SHORT = (
    "only the script's reserve of descriptors was left. Raise the limit of open files (ulimit -n)"
)
_HEAD_END = re.compile(rb"\r?\n\r?\n")


class EntranceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of connections whose peers have not shown a key."""

    max_unknown: int = 1024
    """Maximum number of them; it is also at most half of the descriptors for connections."""
    max_head_bytes: int = 32 << 10
    """Maximum bytes of the first request's head."""
    head_s: float = 10.0
    """Longest time in seconds until a peer has shown a key, however it spreads its bytes."""
    grace_s: float = 0.5
    """Time in seconds that each peer has before newer ones evict it."""
    linger_s: float = 1.0
    """Longest time in seconds in which a refused peer may send on. Its bytes are dropped; a
    connection that is closed before its peer has sent all may lose the answer."""
    max_linger_bytes: int = 1 << 20
    """Maximum bytes that a refused peer may send on."""


_LIMITS = EntranceLimits()


class Verdict(msgspec.Struct, frozen=True):
    """Refusal of a request by its head."""

    reason: str
    """Predicate of a sentence about the peer, without anything that it has sent."""
    answer: bytes
    """The whole response."""


class Entrance:
    """Accepts connections, and hands on those whose first request has a key.

    The peers before that, here called unknown, are limited in number, time and bytes. When there
    are too many, the oldest one of the address with the most of them is evicted for each new one,
    once it has had its time. Until then, new connections wait in the kernel's queue, so that a
    burst of agents loses none. Some descriptors stay free for the rest of the process: when only
    those are left, a new connection evicts an unknown or an idle one, or is refused.

    Args:
        listeners: Listening sockets, which close() closes.
        judge: Returns why a request is refused, given its head; None if it has a key.
        make: Makes the protocol that serves a connection from its first request on.
        refusals: Log of refused connections.
        limits: Limits of connections whose peers have not shown a key.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        judge: Callable[[bytes], Verdict | None],
        make: Callable[[], asyncio.Protocol],
        refusals: RefusalLog,
        limits: EntranceLimits = _LIMITS,
    ) -> None:
        self.judge, self.make, self.limits = judge, make, limits
        self._listeners, self._refusals = listeners, refusals
        self._loop = asyncio.get_running_loop()
        self._unknown: dict[_Connection, None] = {}
        self._known: dict[_Connection, None] = {}
        """Connections without and with a key, each oldest first."""
        self._starting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        for listener in listeners:
            listener.setblocking(False)
        self._resume()

    async def close(self) -> None:
        """Refuse further connections, and end those without a key."""
        self._stop_accepting()
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for each in list(self._unknown):
            each.abort()
        self._refusals.close()

    def know(self, connection: _Connection) -> None:
        """Count a connection among those with a key."""
        del self._unknown[connection]
        self._known[connection] = None
        self._resume_early()

    def forget(self, connection: _Connection) -> None:
        """Count a connection no more."""
        self._unknown.pop(connection, None)
        self._known.pop(connection, None)
        self._resume_early()

    def note(self, reason: str, host: str) -> None:
        """Count a refused connection."""
        self._refusals.note(f"was refused: it {reason}", host)

    def _accept(self, listener: socket.socket) -> None:
        # One at a time, so that other connections progress however fast new ones arrive.
        most_open = _max_descriptors()
        evicted = None
        if len(self._unknown) >= min(self.limits.max_unknown, most_open // 2):
            evicted = self._oldest()
            left_s = evicted.since + self.limits.grace_s - self._loop.time()
            if left_s > 0:
                self._stop_accepting(left_s)
                return
        try:
            accepted, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files
            self._refusals.note(f"could not be accepted: {error.strerror}", "this network")
            self._make_room()
            self._stop_accepting(_ACCEPT_PAUSE_S)
            return
        if evicted is not None:
            self._evict(evicted)
        # The system gives the lowest free descriptor, so all lower ones are in use.
        if accepted.fileno() >= most_open and not self._make_room():
            accepted.close()
            self.note(f"came while {_SHORT}", address[0])
            return
        accepted.setblocking(False)
        connection = _Connection(self, address[0])
        self._unknown[connection] = None
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted)
        )
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _oldest(self) -> _Connection:
        """Return the oldest unknown connection of the address with the most of them."""
        ((host, _),) = collections.Counter(each.host for each in self._unknown).most_common(1)
        return next(each for each in self._unknown if each.host == host)

    def _make_room(self) -> bool:
        """Evict an unknown or idle connection; return False if there is none."""
        if self._unknown:
            self._evict(self._oldest())
            return True
        idle = [each for each in self._known if each.num_requests == 0]
        if idle:
            oldest = min(idle, key=lambda each: each.used_at)
            self.note(f"was idle while {_SHORT}", oldest.host)
            oldest.abort()
        return bool(idle)

    def _evict(self, connection: _Connection) -> None:
        if not connection.is_refused:
            self.note("had shown no key when newer connections evicted it", connection.host)
        connection.abort()

    def _stop_accepting(self, pause_s: float | None = None) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if pause_s is not None:
            self._pause = self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._pause = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _resume_early(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._resume()


class _Connection(asyncio.Protocol):
    """Reads the head of the first request, and passes all on once it has a key."""

    def __init__(self, entrance: Entrance, host: str) -> None:
        self.host = host
        self.num_requests = 0
        """Requests in progress."""
        self._loop = asyncio.get_running_loop()
        self.since = self.used_at = self._loop.time()
        self._entrance = entrance
        self._head = bytearray()
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._num_dropped: int | None = None
        """Bytes dropped since the refusal; None without one."""
        self._timer = self._loop.call_later(entrance.limits.head_s, self._expire)
        self._is_aborted = False

    @property
    def is_refused(self) -> bool:
        """Whether its peer was answered with a refusal."""
        return self._num_dropped is not None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request in progress while the body runs."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self.used_at = self._loop.time()

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._is_aborted = True
        self._timer.cancel()
        self._entrance.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)
        elif self._num_dropped is not None:
            self._num_dropped += len(data)
            if self._num_dropped > self._entrance.limits.max_linger_bytes:
                self.abort()
        elif not self._is_aborted:
            self._read_head(data)

    def _read_head(self, data: bytes) -> None:
        most, searched = self._entrance.limits.max_head_bytes, max(0, len(self._head) - 3)
        # Lines before a request are ignored, as RFC 9112 recommends.
        self._head += data if self._head else data.lstrip(b"\r\n")
        if not self._head:
            return
        found = _HEAD_END.search(self._head, searched)
        if (len(self._head) if found is None else found.end()) > most:
            self._refuse(Verdict(f"sent a head of more than {most >> 10} KiB", _TOO_LARGE))
        elif found is not None or not self._head[:1].isalpha():  # the latter: TLS
            verdict = self._entrance.judge(bytes(self._head[: found and found.end()]))
            if verdict is None:
                self._begin()
            else:
                self._refuse(verdict)

    def _begin(self) -> None:
        assert self._transport is not None
        self._timer.cancel()
        self._entrance.know(self)
        self._inner = self._entrance.make()
        data, self._head = bytes(self._head), bytearray()
        self._inner.connection_made(self._transport)
        self._inner.data_received(data)

    def _refuse(self, verdict: Verdict) -> None:
        assert self._transport is not None
        self._entrance.note(verdict.reason, self.host)
        self._head, self._num_dropped = bytearray(), 0
        self._timer.cancel()
        self._timer = self._loop.call_later(self._entrance.limits.linger_s, self.abort)
        self._transport.write(verdict.answer)
        self._transport.write_eof()

    def _expire(self) -> None:
        self._entrance.note(f"showed no key within {self._entrance.limits.head_s:g} s", self.host)
        self.abort()

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._entrance.forget(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)


_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n"


def in_use(transport: asyncio.BaseTransport | None) -> contextlib.AbstractContextManager[None]:
    """Count a request in progress on a connection, which keeps it from being evicted as idle."""
    connection = None if transport is None else transport.get_protocol()
    return connection.in_use() if isinstance(connection, _Connection) else contextlib.nullcontext()


def _max_descriptors() -> int:
    """Return the number of open descriptors beyond which the rest is kept in reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return soft - min(soft // 8, 1024)
