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
from typing import Any, NamedTuple, Protocol

import msgspec

from helmsman._base.event_loop import Deadline, run_in_executor, threads_awaited
from helmsman._base.readiness import Bell, Leader, Readers, readers_of
from helmsman._wire.codec import Payload
from helmsman._wire.memory import populate
from helmsman._wire.messages import Reply
from helmsman._wire.segments import ShmSegment
from helmsman._wire.stream import WOULD_BLOCK, Stream
from helmsman._wire.wire import (
    HELLO,
    LENGTH_BYTES,
    WELCOME,
    FrameReader,
    Outgoing,
    Session,
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
"""Malloc maps larger buffers anew for each read, which costs 20 us."""
_IN_THREAD_BYTES = 1 << 20
"""From this size on, arguments are packed and the pages of a result mapped off the event loop."""


@functools.cache
def backlog_limit_bytes() -> int:
    """Limit of the bytes, shared memory included, of requests that one worker has not yet taken.

    It is a quarter of the machine's memory. A call that would exceed it is refused, unless no
    earlier request is waiting.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


_GREET_S = 5.0
_LONGEST_WAIT_S = 1e6
"""Limit of one wait for a socket; the system's limit is little larger."""

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


class _TakenReply(NamedTuple):
    awaited: Awaited
    reply: Reply
    payload: Payload | None
    """None if the side path carries it, or after a failure."""
    failure: Exception | None
    """Why the payload could not be taken."""
    is_mapped: bool
    """Whether the pages of the payload are mapped."""


class Channel(Transport):
    """A session with a worker. Its methods run on the event loop; ``post`` and ``read`` on others.

    It does not use asyncio's transports, which would be a third of the cost of a call. Each message
    is written by one system call on the caller's thread and read by another. The caller of the only
    pending request leads: its thread or loop reads the connection, so that no other thread wakes
    for the reply. A further request makes the channel's event loop the reader again, so that no
    caller depends on the thread of another one.

    Args:
        worker_id: Id of the worker, for messages.
        connect: Opens the connection, and a new one after a loss.
        process: The worker's process.
        shares_memory: Whether the worker is on this machine.
        side_path: Carries the payloads that the channel cannot carry; None if it can carry all.
    """

    has_connection = True

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
        self._reading = threading.RLock()
        """Held while the connection is read or replaced; taken before ``_writing``."""
        self._leader: Leader | None = None
        """Reads the connection; None for the event loop."""
        self._led = 0
        """Id of the leader's request."""
        self._is_watched = True
        """Whether the event loop wakes for messages; if not, only for the connection's end."""
        self._writing = threading.Lock()
        """Held while a message is numbered and written, while the reader changes, and while the
        connection is replaced or, with TLS, read.
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
        self._loop_thread = threading.get_ident()
        self._readers = readers_of(self._loop)
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
        with self._reading, self._writing:
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
        self._is_watched = True
        self._readers.add(sock, self._read_here)

    def _detach(self) -> None:
        if self._socket is not None:
            self._let_read(None)
            self._readers.remove(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def _let_read(self, leader: Leader | None) -> None:
        """Change the reader; ``_writing`` is held."""
        former, self._leader = self._leader, leader
        if (sock := self._socket) is None:
            return
        if former is not leader:
            if isinstance(former, Bell):
                former.ring()
            elif former is not None:
                former.remove(sock)
            if isinstance(leader, Readers):
                leader.add(sock, functools.partial(self._read_own, sock, leader))
        if self._is_watched != (leader is None):
            self._is_watched = leader is None
            self._readers.turn(sock, on=self._is_watched)

    def hand_back(self) -> None:
        thread = threading.get_ident()
        try:
            threads_awaited.add(thread)
            with self._writing:
                self._let_read(None)
        finally:
            threads_awaited.discard(thread)

    def _drop(self, sock: socket.socket) -> None:
        """Replace a lost connection."""
        if self._socket is sock:
            with self._reading, self._writing:
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
                with self._reading, self._writing:
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

    def post(self, outgoing: Outgoing, awaited: Awaited, leader: Leader | None = None) -> None:
        thread = threading.get_ident()
        if thread in threads_awaited:
            # A signal handler or finalizer has interrupted this method in the same thread.
            self._loop.call_soon_threadsafe(self._post_here, outgoing, awaited)
            return
        body, segment = None, None
        waits = isinstance(leader, Bell) and not self._to_pack
        if (outgoing.is_small and not outgoing.payload.handles) or (
            (outgoing.is_small or waits)
            and can_carry(outgoing.payload, shares_memory=self.shares_memory)
        ):
            try:
                if outgoing.is_small:
                    body = outgoing.body()
                else:  # packed here, since no other thread has to wait for it
                    body, segment = outgoing.packed(shares_memory=self.shares_memory)
            except (OSError, MemoryError) as error:
                self._on_loop(awaited.failed, error)
                return
        try:
            threads_awaited.add(thread)
            with self._writing:
                if body is not None and not (outgoing.in_order and self._to_pack):
                    self._write(outgoing, body, awaited, segment, leader)
                    return
                if outgoing.in_order:
                    self._to_pack.add(outgoing.request.id)
            if segment is not None:
                segment.close()
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
        self,
        outgoing: Outgoing,
        body: bytes,
        awaited: Awaited,
        segment: ShmSegment | None = None,
        leader: Leader | None = None,
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
            # Before it is sent: otherwise the event loop may wake for the reply.
            if self._awaited or sock is None or leader is self._readers:
                leader = None
            if leader is not None:
                self._led = outgoing.request.id
            self._let_read(leader)
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

    def read(self, bell: Bell, limit_s: float) -> None:
        deadline = Deadline(limit_s)
        try:
            while self._leader is bell:
                sock, left_s = self._socket, deadline.remaining_s
                if sock is not None and bell.wait_with(sock, min(left_s, _LONGEST_WAIT_S)):
                    self._read_own(sock, bell)
                elif not left_s:
                    break
        finally:
            if self._leader is bell:
                self.hand_back()

    def _read_own(self, sock: socket.socket, leader: Leader) -> None:
        """Read for the leader, on its thread."""
        thread, is_lost = threading.get_ident(), False
        found: list[_TakenReply] = []
        try:
            try:
                threads_awaited.add(thread)
                with self._reading:
                    if self._leader is leader and self._socket is sock:
                        is_lost = True  # if it is interrupted; the worker sends the rest again
                        is_lost = not self._receive(sock, self._led, found)
                        self._end_lead(len(found), is_lost=is_lost)
            finally:
                if is_lost:
                    self._loop.call_soon_threadsafe(self._drop, sock)
                threads_awaited.discard(thread)
            for outcome in found:
                self._conclude(outcome, may_block=isinstance(leader, Bell))
        except BaseException:
            # An interrupt, which must not lose an outcome that counts as received.
            for outcome in found:
                self._awaited.setdefault(outcome.reply.id, outcome.awaited)
                self._loop.call_soon_threadsafe(self._deliver, outcome)
            raise

    def _end_lead(self, num_found: int, *, is_lost: bool) -> None:
        """End the lead if the outcome has come, or if more is to come that is not the leader's."""
        if is_lost or len(self._awaited) > 1 or (num_found and self._session.num_kept_bytes):
            with self._writing:
                self._let_read(None)
        elif num_found and isinstance(self._leader, Bell):
            self._leader = None

    def _conclude(self, outcome: _TakenReply, *, may_block: bool) -> None:
        """Deliver an outcome on the thread that waits for it."""
        if outcome.payload is None or not (outcome.is_mapped or may_block):
            self._loop.call_soon_threadsafe(self._deliver, outcome)
            return
        if not outcome.is_mapped:
            populate(outcome.payload.buffers)
        if self._awaited.pop(outcome.reply.id, None) is not None:
            outcome.awaited.replied(outcome.reply, outcome.payload)

    def _read_here(self) -> None:
        """Read on the event loop."""
        with self._reading:
            sock = self._socket
            assert sock is not None
            try:
                if not self._receive(sock, None, []):
                    self._drop(sock)
            except Exception:
                # Such as MemoryError: over the next connection the worker sends all uncounted
                # messages again.
                log.exception(
                    "%s: replacing its connection: a message could not be processed",
                    self._worker_id,
                )
                self._drop(sock)

    def _receive(self, sock: socket.socket, own: int | None, found: list[_TakenReply]) -> bool:
        """Read what has arrived; returns False if the connection is lost. ``_reading`` is held.

        The outcome of request ``own`` goes to ``found``, others to the event loop.
        """
        try:
            # TLS allows one thread at a time. Otherwise the lock is not taken, so that the loop
            # does not wait for a signal handler that has interrupted a write.
            with self._writing if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext():
                data = sock.recv(_READ_BYTES)
        except WOULD_BLOCK:
            return True
        except OSError as error:
            if error.errno is None:  # raised by a signal handler
                raise
            return False
        self._heard_at = time.monotonic()
        try:
            for message in self._reader.feed(data):
                self._take(message, own, found)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._on_loop(self.close, f"it sent a message that cannot be decoded: {error}")
        return bool(data)

    def _take(self, message: bytes, own: int | None, found: list[_TakenReply]) -> None:
        if not self.is_open:  # an earlier message of the same read has ended the session
            return
        body = self._session.take(message)
        if not body:
            return
        frame = decode_reply(body)
        reply, wire = frame.reply, frame.payload
        if (awaited := self._awaited.get(reply.id)) is not None:
            payload: Payload | None = None
            failure: Exception | None = None
            is_mapped = wire is None or wire.segment is None or wire.segment.size < _IN_THREAD_BYTES
            try:
                if wire is not None:
                    payload = from_wire(wire, populated=is_mapped)
            # No memory is left, or it does not unpickle: only this result is lost
            except Exception as error:  # noqa: BLE001
                failure = error
            # Before it is counted: the worker sends it again after an interrupt.
            outcome = _TakenReply(awaited, reply, payload, failure, is_mapped)
            if reply.id == own:
                found.append(outcome)
            else:
                self._on_loop(self._deliver, outcome)
        if self._session.taken(len(body), wire):
            with self._writing:
                if self._socket is not None and self._socket is not self._cut:
                    self._send(self._socket, self._session.confirmation())

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        if threading.get_ident() == self._loop_thread:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outcome: _TakenReply) -> None:
        _, reply, payload, failure, is_mapped = outcome
        if failure is None and (payload is None or not is_mapped):
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
