"""The controller's end of a worker's channel, and the transport that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import in_thread
from helmsman.controller._transport.base import Awaited, Ending, Transport, TransportLostError, Turn
from helmsman.rpc_server._server.channel import can_carry
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.messages import Reply
from helmsman.rpc_server._wire.segments import ShmSegment
from helmsman.rpc_server._wire.stream import WOULD_BLOCK, Stream
from helmsman.rpc_server._wire.wire import (
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

log = logging.getLogger(__name__)

RECONNECT_S = 30.0
"""How long the controller tries to reconnect to a worker that lives, before it gives the worker up."""

_GREET_S = 5.0
_RECONNECT_PAUSE_S = 0.05
_READ_BYTES = 1 << 18
_PACK_IN_THREAD_BYTES = 1 << 20

Connect = Callable[[], Awaitable[socket.socket]]
"""Makes an authenticated connection, plain or TLS. Raises OSError, ProtocolError."""


class SidePath(Protocol):
    """Carries payloads that a channel cannot carry. Both methods raise TransportLostError, ProtocolError, HandleLostError."""

    async def bring(self, request_id: int, payload: Payload) -> None:
        """Bring the arguments of a request to the worker, before the request itself."""

    async def fetch(self, request_id: int) -> Payload:
        """Fetch the result of a request whose reply came without it."""


class Channel:
    """A session with a worker. All methods run on the event loop.

    Without asyncio's transports, which would be a third of the cost of a call: a message is written with one system call, and
    read with another.

    Args:
        worker_id: for the log.
        connect: makes the connection, and a new one when that is lost.
        shares_memory: whether the worker is on this machine.
        side_path: carries the payloads that the channel cannot carry; None where it can carry all.
    """

    def __init__(self, worker_id: str, connect: Connect, *, shares_memory: bool, side_path: SidePath | None = None) -> None:
        self.shares_memory = shares_memory
        self.lost_because = ""
        """Why the worker was given up though its process may live."""
        self.is_open = True
        """Whether requests may still be answered; also during a reconnection."""
        self._worker_id = worker_id
        self._connect = connect
        self._side_path = side_path
        self._token = secrets.token_bytes(16)
        self._session = Session()
        self._awaited: dict[int, Awaited] = {}
        """By request id."""
        self._socket: socket.socket | None = None
        """None during a reconnection."""
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        """The event loop itself holds tasks only weakly."""

    async def open(self) -> None:
        """Connect for the first time. Raises OSError, ProtocolError."""
        sock, _ = await self._greet(-1)
        self._attach(sock)

    def write(self, request_id: int, body: bytes, awaited: Awaited, segment: ShmSegment | None = None) -> None:
        """Send a request; its segment is closed once the worker has taken it.

        Raises: ProtocolError for one that is too large, TransportLostError.
        """
        if not self.is_open:
            if segment is not None:
                segment.close()
            raise TransportLostError(self.lost_because)
        message = self._session.keep(body, segment)
        self._awaited[request_id] = awaited
        self._write(message)

    def close(self, reason: str = "") -> None:
        """End the session; ``reason`` is for the errors of requests that are not answered. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self.lost_because = reason
        self._detach()
        for task in self._tasks:
            task.cancel()
        self._session.close()
        while self._awaited:
            self._awaited.popitem()[1].failed(TransportLostError(reason))

    # --- the connection ---------------------------------------------------------------------------------------------

    async def _greet(self, num_received: int) -> tuple[socket.socket, int]:
        """Connect; returns the number of messages that the worker has received, too. Raises OSError, ProtocolError."""
        stream = Stream(await self._connect())
        try:
            async with asyncio.timeout(_GREET_S):
                stream.write(pack_length(HELLO.size) + HELLO.pack(self._token, num_received))
                welcome = await stream.read(unpack_length(await stream.read(LENGTH_BYTES)))
            if len(welcome) != WELCOME.size:
                raise ProtocolError(f"the worker's first message has {len(welcome)} bytes, expected {WELCOME.size}")
        except EOFError as error:
            stream.close()
            raise ConnectionResetError("the worker closed the connection at once") from error
        except BaseException:
            stream.close()
            raise
        return stream.detach(), WELCOME.unpack(welcome)[0]

    def _attach(self, sock: socket.socket) -> None:
        self._socket, self._reader = sock, FrameReader()
        self._loop.add_reader(sock, self._read)

    def _detach(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def _drop(self, sock: socket.socket) -> None:
        """Replace a connection that is lost."""
        if self._socket is sock:
            self._detach()
            self._in_background(self._resume())

    async def _resume(self) -> None:
        deadline = Deadline(RECONNECT_S)
        reason = ""
        while not deadline.passed:
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    sock, num_received = await self._greet(self._session.num_received)
            except (OSError, ProtocolError) as error:
                reason = f": {error}"
                if self.shares_memory and isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    self.close()  # no process listens there any more
                    return
                await asyncio.sleep(_RECONNECT_PAUSE_S)
                continue
            if num_received < 0:
                sock.close()
                self.close("its connection was lost, and it has ended the session of this controller")
                return
            self._attach(sock)
            try:
                for message in self._session.resume(num_received):
                    self._write(message)
            except ProtocolError as error:
                self.close(f"its connection was lost and could not be resumed: {error}")
                return
            log.warning("%s: its connection was lost and restored after %.2f s", self._worker_id, deadline.elapsed_s)
            return
        self.close(f"its connection was lost and could not be restored within {RECONNECT_S:g} s{reason}")

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _write(self, message: bytes) -> None:
        sock = self._socket
        if sock is None:
            return  # the next connection begins with it
        if self._unsent:
            self._unsent += message
            return
        try:
            num_sent = sock.send(message)
        except WOULD_BLOCK:
            num_sent = 0
        except OSError:
            self._loop.call_soon(self._drop, sock)
            return
        if num_sent < len(message):
            self._unsent += memoryview(message)[num_sent:]
            self._loop.add_writer(sock, self._write_rest, sock)

    def _write_rest(self, sock: socket.socket) -> None:
        try:
            num_sent = sock.send(self._unsent)
        except WOULD_BLOCK:
            return
        except OSError:
            self._drop(sock)
            return
        del self._unsent[:num_sent]
        if not self._unsent:
            self._loop.remove_writer(sock)

    def _read(self) -> None:
        sock = self._socket
        assert sock is not None
        try:
            data = sock.recv(_READ_BYTES)
        except WOULD_BLOCK:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
            return
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except (ProtocolError, msgspec.MsgspecError) as error:
            self.close(f"it sent a message that cannot be understood: {error}")

    def _take(self, message: bytes) -> None:
        if not self.is_open:  # an earlier message of the same read has ended the session
            return
        body = self._session.take(message)
        if not body:
            return
        frame = decode_reply(body)
        reply, wire = frame.reply, frame.payload
        awaited = self._awaited.get(reply.id)
        payload: Payload | None = None
        failure: Exception | None = None
        if awaited is not None and wire is not None:
            try:
                payload = from_wire(wire)
            except Exception as error:  # noqa: BLE001 - no memory is left, or it does not unpickle: the loss of this result alone
                failure = error
        if self._session.taken(len(body), wire):
            self._write(self._session.confirmation())
        if awaited is None:
            return
        if failure is None and payload is None:
            self._in_background(self._fetch(reply))  # awaited until it ends: close may cancel it before its first step
            return
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
        except BaseException:  # taking an answer may unpickle it; the other messages of the same read must not be lost with it
            log.exception("%s: the answer to request %d could not be taken", self._worker_id, reply.id)

    async def _fetch(self, reply: Reply) -> None:
        payload: Payload | None = None
        failure: Exception | None = None
        try:
            if self._side_path is None:
                raise ProtocolError(f"{self._worker_id}: a reply came without its result")
            payload = await self._side_path.fetch(reply.id)
        except asyncio.CancelledError:
            self._hand_over(reply, None, TransportLostError(self.lost_because))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            failure = error
        self._hand_over(reply, payload, failure)


class WorkerProcess(Protocol):
    """The process behind a channel."""

    async def ending(self, lost_because: str) -> Ending:
        """As Transport's; a process that lives though its channel was given up is ended, and ``lost_because`` is the cause."""

    async def observe(self, limit_s: float) -> bytes:
        """As Transport's."""

    async def wait_ended(self, limit_s: float) -> None:
        """As Transport's."""

    async def kill(self) -> None:
        """As Transport's."""


class ChannelTransport(Transport):
    """Sends requests by a channel.

    Args:
        channel: is open; the transport closes it.
        process: the worker's.
        side_path: the channel's.
    """

    def __init__(self, channel: Channel, process: WorkerProcess, side_path: SidePath | None = None) -> None:
        self.channel = channel
        self.process = process
        self._side_path = side_path
        self._turn = Turn()
        """Of engine work that is packed and sent."""
        self._sending: set[asyncio.Task[None]] = set()
        """The event loop itself holds tasks only weakly."""

    def post(self, outgoing: Outgoing, awaited: Awaited) -> None:
        in_order = outgoing.in_order
        if (
            outgoing.is_small
            and (not in_order or not self._turn.num_claims)
            and (not outgoing.payload.handles or can_carry(outgoing.payload, shares_memory=self.channel.shares_memory))
        ):
            self.channel.write(outgoing.request.id, outgoing.body(), awaited)
            return
        turn = self._turn.claim() if in_order else contextlib.nullcontext()
        task = asyncio.ensure_future(self._send(outgoing, awaited, turn))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, outgoing: Outgoing, awaited: Awaited, turn: contextlib.AbstractAsyncContextManager[None]) -> None:
        try:
            async with turn:
                body, segment = await self._packed(outgoing)
                self.channel.write(outgoing.request.id, body, awaited, segment)
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            awaited.failed(error)

    async def _packed(self, outgoing: Outgoing) -> tuple[bytes, ShmSegment | None]:
        shares_memory = self.channel.shares_memory
        if self._side_path is not None and not can_carry(outgoing.payload, shares_memory=shares_memory):
            body = outgoing.framed()  # first: arguments of a request that cannot be sent would stay in the worker
            await self._side_path.bring(outgoing.request.id, outgoing.payload)
            return body, None
        if outgoing.num_bytes >= _PACK_IN_THREAD_BYTES:
            return await in_thread(functools.partial(outgoing.packed, shares_memory=shares_memory))
        return outgoing.packed(shares_memory=shares_memory)

    async def ending(self) -> Ending:
        return await self.process.ending(self.channel.lost_because)

    async def observe(self, limit_s: float) -> bytes:
        return await self.process.observe(limit_s)

    async def wait_ended(self, limit_s: float) -> None:
        await self.process.wait_ended(limit_s)

    async def kill(self) -> None:
        self.channel.close()
        await self.process.kill()
