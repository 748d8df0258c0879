"""The controller's end of a worker's channel, which reconnects when its socket is lost.

If that fails for RECONNECT_S, all calls of the worker fail by WorkerFailedError.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from helmsman._base.event_loop import Deadline, run_in_executor, threads_awaited
from helmsman._wire.codec import Payload
from helmsman._wire.memory import populate
from helmsman._wire.messages import Reply
from helmsman._wire.segments import ShmSegment
from helmsman._wire.session import HELLO, WELCOME, Session
from helmsman._wire.stream import WOULD_BLOCK, Stream
from helmsman._wire.wire import (
    INLINE_BYTES,
    LENGTH_BYTES,
    FrameReader,
    Outgoing,
    decode_reply,
    from_wire,
    pack_length,
    unpack_length,
)
from helmsman.api.errors import ProtocolError, WorkerBacklogError
from helmsman.controller._scheduler.transport.base import (
    Awaited,
    Ending,
    Transport,
    TransportLostError,
    WorkerProcess,
)
from helmsman.rpc_server._server.channel import can_carry

log = logging.getLogger(__name__)

RECONNECT_S = 30.0
"""Longest attempt to reconnect to a live worker before it is given up."""

_EXIT_S = 1.0
"""Longest wait for a killed process to exit. Its forked children may hold the connection longer."""
_RECONNECT_PAUSE_S = 0.05
_READ_BYTES = 1 << 16
"""malloc maps a larger buffer by a system call for each read, which costs as much as the read."""
_IN_THREAD_BYTES = 1 << 20
"""From this size on, arguments are packed and the pages of a result mapped off the event loop."""
_PACKED_HERE_BYTES = 1 << 21
"""Below this size, a thread other than the event loop's packs its arguments itself: handing them
over costs more.
"""


@functools.cache
def backlog_limit_bytes() -> int:
    """Limit of the bytes, shared memory included, of requests that one worker has not yet taken.

    It is a quarter of the machine's memory. A call that would exceed it is refused, unless no
    earlier request is waiting.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


_GREET_S = 5.0

Connect = Callable[[], Awaitable[socket.socket]]
"""Opens an authenticated connection, plain or TLS. Raises OSError or ProtocolError."""


class Connector:
    """Connects to a worker and exchanges the first messages, which name the session.

    Attempts are numbered, so that the worker refuses one that arrives after a later one.
    """

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.token = secrets.token_bytes(16)
        """Identifies the session."""
        self._num_attempts = 0

    async def open(self, num_received: int) -> tuple[socket.socket, int]:
        """Connect; returns the socket and the number of messages that the worker has received.

        ``num_received`` is the number that this end has received. Raises OSError or ProtocolError.
        """
        hello = HELLO.pack(self.token, self._num_attempts, num_received)
        self._num_attempts += 1
        stream = Stream(await self.connect())
        try:
            async with asyncio.timeout(_GREET_S):
                stream.write(pack_length(HELLO.size) + hello)
                welcome = await stream.read(unpack_length(await stream.read(LENGTH_BYTES)))
            if len(welcome) != WELCOME.size:
                raise ProtocolError(
                    f"the worker's first message has {len(welcome)} bytes, expected {WELCOME.size}"
                )
        except EOFError as error:
            stream.close()
            raise ConnectionResetError("the worker closed the connection immediately") from error
        except BaseException:
            stream.close()
            raise
        return stream.detach(), WELCOME.unpack(welcome)[0]


class SidePath(Protocol):
    """Carries payloads that a channel cannot carry.

    Both methods raise TransportLostError, ProtocolError or HandleLostError.
    """

    async def bring(self, request_id: int, payload: Payload) -> None:
        """Send the arguments of a request to the worker, before the request itself."""

    async def fetch(self, request_id: int) -> Payload:
        """Fetch the result of a request whose reply came without it."""


class Channel(Transport):
    """A session with a worker. Its methods run on the event loop, ``post`` on any thread.

    It does not use asyncio's transports, which would be a third of the cost of a call. Each message
    is written by one system call on the caller's thread and read by another.

    Args:
        worker_id: Id of the worker, for messages.
        connect: Opens the connection, and a new one after a loss.
        process: The worker's process.
        shares_memory: Whether the worker is on this machine.
        side_path: Carries the payloads that the channel cannot carry; None if it can carry all.
    """

    def __init__(
        self,
        worker_id: str,
        connect: Connect,
        process: WorkerProcess,
        *,
        shares_memory: bool,
        side_path: SidePath | None = None,
    ) -> None:
        self.process = process
        self.shares_memory = shares_memory
        self.lost_because = ""
        """Why the worker was given up although its process may be running."""
        self.is_open = True
        """Whether requests may still be answered; remains True during a reconnection."""
        self._worker_id = worker_id
        self._connector = Connector(connect)
        self._side_path = side_path
        self._session = Session()
        self._awaited: dict[int, Awaited] = {}
        self._socket: socket.socket | None = None
        """None during a reconnection."""
        self._heard_at = 0.0
        """Time of the last received bytes, by time.monotonic()."""
        self._reader = FrameReader()
        self._writing = threading.Lock()
        """Held while a message is numbered and written, and while the connection is read or
        replaced.
        """
        self._cut: socket.socket | None = None
        """Connection to which a message is being written. If set while ``_writing`` is free: a
        connection with an incomplete message.
        """
        self._unsent = bytearray()
        self._packing = asyncio.Lock()
        self._to_pack: set[int] = set()
        """Ids of engine calls that are not written yet; later engine calls queue behind them."""
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Strong references, since the event loop holds tasks only weakly."""

    async def open(self) -> None:
        """Connect for the first time.

        Raises:
            OSError: The connection failed.
            ProtocolError: Authentication or the handshake failed.
        """
        sock, _ = await self._connector.open(self._session.num_received)
        self._attach(sock)

    def close(self, reason: str = "") -> None:
        """End the session; unanswered requests fail with ``reason``. Idempotent."""
        with self._writing:
            if not self.is_open:
                return
            self.is_open = False
            self.lost_because = reason
            self._detach()
            self._session.close()
        if self._resuming is not None:
            self._resuming.cancel()
        while self._awaited:
            self._awaited.popitem()[1].failed(TransportLostError(reason))

    async def ending(self) -> Ending:
        return await self.process.ending(self.lost_because)

    async def observe(self, limit_s: float) -> bytes:
        return await self.process.observe(limit_s)

    async def wait_ended(self, limit_s: float) -> None:
        await self.process.wait_ended(limit_s)

    async def kill(self) -> None:
        with contextlib.ExitStack() as stack:
            witness: socket.socket | None = None
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # without a free descriptor it is killed without this wait
                    witness = stack.enter_context(
                        socket.socket(fileno=os.dup(self._socket.fileno()))
                    )
            self.close()
            await self.process.kill()
            # Ray reports an actor dead before its process has exited; the connection ends with the
            # process.
            if witness is not None:
                witness.setblocking(False)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_EXIT_S):
                        while await self._loop.sock_recv(witness, _READ_BYTES):
                            pass

    # --- the connection ---------------------------------------------------------------------------

    def renew(self, silent_since: float) -> None:
        if self._socket is not None and self._heard_at < silent_since:
            log.warning("%s: replacing its connection: it runs but does not reply", self._worker_id)
            self._drop(self._socket)

    def _attach(self, sock: socket.socket) -> None:
        self._socket, self._reader, self._heard_at = sock, FrameReader(), time.monotonic()
        self._loop.add_reader(sock, self._read)

    def _detach(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def _drop(self, sock: socket.socket) -> None:
        """Replace a lost connection."""
        if self._socket is sock:
            with self._writing:
                self._detach()
            self._resuming = self._in_background(self._resume())

    async def _resume(self) -> None:
        deadline = Deadline(RECONNECT_S)
        reason = ""
        while not deadline.passed:
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    sock, num_received = await self._connector.open(self._session.num_received)
            except (OSError, ProtocolError) as error:
                reason = f": {error}"
                if self.shares_memory and isinstance(
                    error, ConnectionRefusedError | FileNotFoundError
                ):
                    self.close()  # the process has ended
                    return
                await asyncio.sleep(_RECONNECT_PAUSE_S)
                continue
            if num_received < 0:
                sock.close()
                self.close(
                    "its connection was lost, and the worker has ended this controller's session"
                )
                return
            try:
                with self._writing:
                    self._attach(sock)
                    for message in self._session.resume(num_received):
                        if not self._send(sock, message):
                            break
            except ProtocolError as error:
                self.close(f"its connection was lost and could not be resumed: {error}")
                return
            log.warning(
                "%s: its connection was lost and restored after %.2f s",
                self._worker_id,
                deadline.elapsed_s,
            )
            return
        self.close(
            f"its connection was lost and could not be restored within {RECONNECT_S:g} s{reason}"
        )

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- requests ---------------------------------------------------------------------------------

    def post(self, outgoing: Outgoing, awaited: Awaited) -> None:
        thread = threading.get_ident()
        if thread in threads_awaited:
            # A signal handler or finalizer has interrupted this method in the same thread.
            self._loop.call_soon_threadsafe(self._post_here, outgoing, awaited)
            return
        most = INLINE_BYTES if asyncio._get_running_loop() is self._loop else _PACKED_HERE_BYTES
        try:
            threads_awaited.add(thread)
            with self._writing:
                if (
                    outgoing.num_bytes < most
                    and not (outgoing.in_order and self._to_pack)
                    and (
                        (outgoing.is_small and not outgoing.payload.handles)
                        or can_carry(outgoing.payload, shares_memory=self.shares_memory)
                    )
                ):
                    if outgoing.is_small:
                        self._write(outgoing, outgoing.body(), awaited)
                        return
                    try:
                        body, segment = outgoing.packed(shares_memory=self.shares_memory)
                    except OSError as error:
                        if error.errno is None:  # raised by a signal handler
                            raise
                        self._loop.call_soon_threadsafe(awaited.failed, error)
                    else:
                        self._write(outgoing, body, awaited, segment)
                    return
                if outgoing.in_order:
                    self._to_pack.add(outgoing.request.id)
            self._loop.call_soon_threadsafe(
                lambda: self._in_background(self._pack_and_write(outgoing, awaited))
            )
        except BaseException:
            self._to_pack.discard(outgoing.request.id)
            raise
        finally:
            threads_awaited.discard(thread)

    def _post_here(self, outgoing: Outgoing, awaited: Awaited) -> None:
        try:
            self.post(outgoing, awaited)
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            awaited.failed(error)

    async def _pack_and_write(self, outgoing: Outgoing, awaited: Awaited) -> None:
        try:
            async with self._packing if outgoing.in_order else contextlib.nullcontext():
                body, segment = await self._packed(outgoing)
                with self._writing:
                    self._write(outgoing, body, awaited, segment)
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            awaited.failed(error)
        finally:
            self._to_pack.discard(outgoing.request.id)

    async def _packed(self, outgoing: Outgoing) -> tuple[bytes, ShmSegment | None]:
        if self._side_path is not None and not can_carry(
            outgoing.payload, shares_memory=self.shares_memory
        ):
            # Encode first: if that failed later, the arguments would stay in the worker.
            body = outgoing.framed()
            await self._side_path.bring(outgoing.request.id, outgoing.payload)
            return body, None
        if outgoing.num_bytes >= _IN_THREAD_BYTES:
            return await run_in_executor(
                functools.partial(outgoing.packed, shares_memory=self.shares_memory)
            )
        return outgoing.packed(shares_memory=self.shares_memory)

    def _write(
        self, outgoing: Outgoing, body: bytes, awaited: Awaited, segment: ShmSegment | None = None
    ) -> None:
        """Send a request; its segment is closed once the worker has taken it.

        ``_writing`` is held.
        """
        sock = self._socket
        try:
            if not self.is_open:
                raise TransportLostError(self.lost_because)
            num_kept = self._session.num_kept_bytes
            if (
                outgoing.is_call
                and num_kept
                and num_kept + outgoing.num_bytes > backlog_limit_bytes()
            ):
                raise WorkerBacklogError(
                    worker_id=self._worker_id,
                    engine_name=outgoing.request.engine_name,
                    method=outgoing.request.method or outgoing.request.verb.value,
                    num_bytes=outgoing.num_bytes,
                    num_waiting_bytes=num_kept,
                    limit_bytes=backlog_limit_bytes(),
                )
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        is_whole, self._cut = self._cut is not sock, sock
        try:
            message = self._session.keep(body, segment)
            self._awaited[outgoing.request.id] = awaited
            if sock is None or (is_whole and self._send(sock, message)):
                self._cut = None
            elif not is_whole:  # a second interrupt may have prevented the first one's drop
                self._loop.call_soon_threadsafe(self._drop, sock)
        except ProtocolError:  # the message is too large and was not kept
            if is_whole:
                self._cut = None
            raise
        except BaseException:
            # An interrupt of the caller's thread: the next connection sends all kept messages.
            if sock is not None:
                self._loop.call_soon_threadsafe(self._drop, sock)
            raise

    def _send(self, sock: socket.socket, message: bytes) -> bool:
        """Write as much as the socket takes; False if it is lost. ``_writing`` is held."""
        if self._unsent:
            self._unsent += message
            return True
        try:
            num_sent = sock.send(message)
        except WOULD_BLOCK:
            num_sent = 0
        except OSError as error:
            if error.errno is None:  # raised by a signal handler, such as TimeoutError("...")
                raise
            self._cut = sock
            self._loop.call_soon_threadsafe(self._drop, sock)
            return False
        if num_sent < len(message):
            self._unsent += memoryview(message)[num_sent:]
            self._loop.call_soon_threadsafe(self._await_writable, sock)
        return True

    def _await_writable(self, sock: socket.socket) -> None:
        if self._socket is sock:
            self._loop.add_writer(sock, self._send_rest, sock)

    def _send_rest(self, sock: socket.socket) -> None:
        with self._writing:
            try:
                del self._unsent[: sock.send(self._unsent)]
            except WOULD_BLOCK:
                return
            except OSError:
                self._loop.call_soon(self._drop, sock)
                return
            if not self._unsent:
                self._loop.remove_writer(sock)

    # --- replies ----------------------------------------------------------------------------------

    def _read(self) -> None:
        sock = self._socket
        assert sock is not None
        try:
            # TLS allows one thread at a time. Otherwise no lock is taken, so that the loop does not
            # wait for a signal handler that has interrupted a write.
            with self._writing if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext():
                data = sock.recv(_READ_BYTES)
        except WOULD_BLOCK:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
            return
        self._heard_at = time.monotonic()
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self.close(f"it sent a message that cannot be decoded: {error}")
        except Exception:
            # Such as MemoryError: over the next connection the worker sends all uncounted messages
            # again.
            log.exception(
                "%s: replacing its connection: a message could not be processed", self._worker_id
            )
            self._drop(sock)

    def _take(self, message: bytes) -> None:
        if not self.is_open:  # an earlier message of the same read has ended the session
            return
        body = self._session.take(message)
        if not body:
            return
        frame = decode_reply(body)
        reply, wire = frame.reply, frame.payload
        awaited = self._awaited.get(reply.id)
        is_large = (
            wire is not None and wire.segment is not None and wire.segment.size >= _IN_THREAD_BYTES
        )
        payload: Payload | None = None
        failure: Exception | None = None
        if awaited is not None and wire is not None:
            try:
                payload = from_wire(wire, populated=not is_large)
            # No memory is left, or it does not unpickle: only this result is lost
            except Exception as error:  # noqa: BLE001
                failure = error
        if self._session.taken(len(body), wire):
            with self._writing:
                if self._socket is not None and self._socket is not self._cut:
                    self._send(self._socket, self._session.confirmation())
        if awaited is None:
            return
        if failure is None and (payload is None or is_large):
            self._in_background(self._complete(reply, payload))
        elif isinstance(failure, ProtocolError):
            # The worker has probably just ended; its end, which fails the call, says more.
            self._loop.call_later(_EXIT_S, self._hand_over, reply, None, failure)
        else:
            self._hand_over(reply, payload, failure)

    def _hand_over(self, reply: Reply, payload: Payload | None, failure: Exception | None) -> None:
        awaited = self._awaited.pop(reply.id, None)
        if awaited is None:
            return
        try:
            if failure is not None:
                awaited.failed(failure)
            elif payload is not None:
                awaited.replied(reply, payload)
        except BaseException:
            # The receiver may unpickle the reply; its failure must not lose the other messages of
            # the same read.
            log.exception(
                "%s: the reply to request %d could not be delivered", self._worker_id, reply.id
            )

    async def _complete(self, reply: Reply, payload: Payload | None) -> None:
        """Deliver a reply after mapping its pages, or fetching its result by the side path."""
        failure: Exception | None = None
        try:
            if payload is not None:
                await run_in_executor(populate, payload.buffers)
            elif self._side_path is not None:
                payload = await self._side_path.fetch(reply.id)
            else:
                raise ProtocolError(f"{self._worker_id}: a reply came without its result")
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            failure = error
        self._hand_over(reply, payload, failure)
