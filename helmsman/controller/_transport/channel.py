"""The controller's end of a direct connection to a worker, and the transports that have one."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.controller._aio.event_loop import in_thread
from helmsman.controller._transport.base import Awaited, Outgoing, Transport, Turn
from helmsman.rpc_server._server.channel import can_carry
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.frames import FrameReader, ReplyFrame, RequestFrame, decode_reply, encode_frame, framed_request
from helmsman.rpc_server._wire.messages import Reply, Request, Verb
from helmsman.rpc_server._wire.payload import WirePayload, from_wire
from helmsman.rpc_server._wire.segments import ShmSegment
from helmsman.rpc_server._wire.stream import WOULD_BLOCK

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_PACK_IN_THREAD_BYTES = 1 << 20
_ACKNOWLEDGE_EACH = 64


class Posted(NamedTuple):
    """A request that was written to a channel and is not answered yet."""

    request_id: int
    number: int
    body: bytes
    awaited: Awaited
    segment: ShmSegment | None

    def settle(self) -> None:
        """The worker has taken the request, or never will."""
        if self.segment is not None:
            self.segment.close()


class Channel:
    """An authenticated connection. All methods run on the event loop, as does what it calls.

    Without asyncio's transports, which would be a third of the cost of a call: a message is written with one system call, and
    read with another.

    Args:
        sock: connected and authenticated, plain or TLS; the channel closes it.
        shares_memory: whether the worker is on this machine.
        acknowledges: whether the worker remembers its replies until it hears that they have arrived.
        on_apart: takes a request whose reply is too large for the channel.
        on_lost: takes the requests without a reply when the connection ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        shares_memory: bool,
        acknowledges: bool,
        on_apart: Callable[[Posted], None],
        on_lost: Callable[[list[Posted]], None],
    ) -> None:
        self.shares_memory = shares_memory
        self.is_open = True
        self._acknowledges = acknowledges
        self._on_apart = on_apart
        self._on_lost = on_lost
        self._socket = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._posted: dict[int, Posted] = {}
        self._received: list[int] = []
        """Requests whose replies have arrived, which the worker does not know yet."""
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def write(self, request_id: int, number: int, body: bytes, awaited: Awaited, segment: ShmSegment | None = None) -> bool:
        """Send a request; its segment is closed once it is answered. False when the connection has ended.

        Raises: ProtocolError for one that is too large.
        """
        posted = Posted(request_id, number, body, awaited, segment)
        if not self.is_open:
            posted.settle()
            return False
        try:
            message = framed_request(number, body)
        except ProtocolError:
            posted.settle()
            raise
        self._posted[request_id] = posted
        self._write(message)
        return True

    def close(self) -> None:
        """End the connection."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        lost = list(self._posted.values())
        self._posted.clear()
        self._on_lost(lost)

    def _write(self, message: bytes) -> None:
        if not self.is_open:
            return
        if self._unsent:
            self._unsent += message
            return
        try:
            num_sent = self._socket.send(message)
        except WOULD_BLOCK:
            num_sent = 0
        except OSError:
            self._loop.call_soon(self.close)  # not at once: who writes does not expect to be told meanwhile
            return
        if num_sent < len(message):
            self._unsent += memoryview(message)[num_sent:]
            self._loop.add_writer(self._socket, self._write_rest)

    def _write_rest(self) -> None:
        try:
            num_sent = self._socket.send(self._unsent)
        except WOULD_BLOCK:
            return
        except OSError:
            self.close()
            return
        del self._unsent[:num_sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except WOULD_BLOCK:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for message in self._reader.feed(data):
                self._take(decode_reply(message))
        except (ProtocolError, msgspec.MsgspecError) as error:
            log.warning("closed a connection to a worker that sent nonsense: %s", error)
            self.close()

    def _take(self, frame: ReplyFrame) -> None:
        posted = self._posted.pop(frame.reply.id, None)
        if posted is None:
            return
        wire = frame.payload
        if wire is None:
            self._on_apart(posted)
            return
        posted.settle()
        try:
            payload = from_wire(wire)
        except Exception as error:  # noqa: BLE001 - no memory is left, or it is nonsense: this result's loss and no other's
            self._acknowledge(posted.request_id, at_once=True)
            posted.awaited.failed(error)
            return
        if self._acknowledges or wire.segment is not None:
            self._acknowledge(posted.request_id, at_once=wire.segment is not None)
        posted.awaited.replied(frame.reply, payload)

    def _acknowledge(self, request_id: int, *, at_once: bool) -> None:
        self._received.append(request_id)
        if at_once or len(self._received) >= _ACKNOWLEDGE_EACH:
            ids = WirePayload(msgspec.msgpack.encode(self._received))
            self._received.clear()
            self._write(framed_request(0, encode_frame(RequestFrame(Request(0, Verb.RECEIVED), ids))))


class ChannelTransport(Transport):
    """A transport whose requests go by a channel, as long as there is one that can carry them."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._turn = Turn()
        """Of engine work that is packed and sent."""
        self._num_sent = 0
        """Engine work sent."""
        self._sending: set[asyncio.Task[None]] = set()
        """The event loop itself holds tasks only weakly."""

    @abc.abstractmethod
    async def _send_otherwise(self, outgoing: Outgoing, number: int) -> Awaitable[tuple[Reply, Payload]]:
        """Send what the channel cannot carry; returns what awaits the answer. Raises TransportLostError where there is no other
        way."""

    def post(self, outgoing: Outgoing, awaited: Awaited) -> None:
        channel = self._channel
        in_order = outgoing.in_order
        if (
            channel is not None
            and channel.is_open
            and outgoing.is_small
            and (not in_order or not self._turn.num_claims)
            and (not outgoing.payload.handles or can_carry(outgoing.payload, shares_memory=channel.shares_memory))
        ):
            body = outgoing.body()  # may raise, so the number is taken after it: the worker waits for every number
            number = 0
            if in_order:
                number = self._num_sent
                self._num_sent += 1
            channel.write(outgoing.request.id, number, body, awaited)
            return
        turn = self._turn.claim() if in_order else contextlib.nullcontext()
        task = asyncio.ensure_future(self._send(outgoing, awaited, turn))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, outgoing: Outgoing, awaited: Awaited, turn: contextlib.AbstractAsyncContextManager[None]) -> None:
        try:
            async with turn:
                number = self._num_sent if outgoing.in_order else 0
                by_channel = await self._sent_by_channel(outgoing, number, awaited)
                answer = None if by_channel else await self._send_otherwise(outgoing, number)
                if outgoing.in_order:
                    self._num_sent += 1  # not before: the worker waits for every number
            if answer is None:
                return
            reply, payload = await answer
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits the answer
            awaited.failed(error)
        else:
            awaited.replied(reply, payload)

    async def _sent_by_channel(self, outgoing: Outgoing, number: int, awaited: Awaited) -> bool:
        channel = self._channel
        if channel is None or not channel.is_open or not can_carry(outgoing.payload, shares_memory=channel.shares_memory):
            return False
        if outgoing.num_bytes >= _PACK_IN_THREAD_BYTES:
            body, segment = await in_thread(functools.partial(outgoing.packed, shares_memory=channel.shares_memory))
        else:
            body, segment = outgoing.packed(shares_memory=channel.shares_memory)
        return channel.write(outgoing.request.id, number, body, awaited, segment)
