"""The controller's end of the direct channel to a worker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server.channel import CHANNEL_BYTES
from helmsman.rpc_server.codec import Payload
from helmsman.rpc_server.frames import decode_reply, pack
from helmsman.rpc_server.messages import Reply, Request
from helmsman.rpc_server.wire import FrameReader, connect_tcp, pack_length

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""How long connecting and proving may take before calls go by way of Ray instead."""


class Posted(msgspec.Struct, frozen=True):
    """A request that was written to a channel."""

    serial: int
    number: int
    request: Request
    payload: Payload
    answer: asyncio.Future[tuple[Reply, Payload]]


Collect = Callable[[Posted], Coroutine[Any, Any, tuple[Reply, Payload]]]


class Channel(asyncio.Protocol):
    """A proved connection.

    Args:
        collect: asks by another way for a reply that is too large for the channel, or that was lost with it.
    """

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._reader = FrameReader()
        self._socket: asyncio.Transport | None = None
        self._posted: dict[int, Posted] = {}
        """Requests whose replies are not here yet, by serial, in that order."""
        self._collecting: set[asyncio.Task[None]] = set()
        self._next = 1
        self.is_open = False

    @classmethod
    async def open(cls, address: tuple[str, int], key: bytes, collect: Collect) -> Channel:
        """Connect to a worker's channel. Raises OSError, ProtocolError."""
        sock: socket.socket = await asyncio.to_thread(connect_tcp, address, key, CONNECT_S)
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(collect), sock=sock)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            frame = decode_reply(message)
            posted = self._posted.get(frame.serial)
            if posted is None:
                continue
            if frame.data:
                del self._posted[frame.serial]
                if not posted.answer.done():
                    posted.answer.set_result((frame.head, Payload(frame.data, list(frame.buffers), [])))
            else:
                self._collect_later(posted)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        for posted in list(self._posted.values()):
            self._collect_later(posted)

    def _collect_later(self, posted: Posted) -> None:
        async def collect() -> None:
            try:
                answer = await self._collect(posted)
            except Exception as error:  # noqa: BLE001 - handed to whoever awaits the answer
                if not posted.answer.done():
                    posted.answer.set_exception(error)
            else:
                if not posted.answer.done():
                    posted.answer.set_result(answer)
            finally:
                self._posted.pop(posted.serial, None)

        task = asyncio.ensure_future(collect())
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)

    def post(self, request: Request, payload: Payload, number: int) -> asyncio.Future[tuple[Reply, Payload]]:
        """Write a request with a small payload; returns the answer to come."""
        assert self._socket is not None
        answer: asyncio.Future[tuple[Reply, Payload]] = asyncio.get_running_loop().create_future()
        serial = self._next
        self._next += 1
        self._posted[serial] = Posted(serial, number, request, payload, answer)
        settled = next(iter(self._posted))
        message, _ = pack(request, payload, inline_below=CHANNEL_BYTES, number=number, serial=serial, settled=settled)
        self._socket.write(pack_length(len(message)) + message)
        return answer

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.abort()


async def open_channel(worker_id: str, address: tuple[str, int], key: bytes, collect: Collect) -> Channel | None:
    """The channel to a worker; None, with a word in the log, where it cannot be had."""
    try:
        return await Channel.open(address, key, collect)
    except (OSError, ProtocolError) as error:
        log.warning(
            "%s: no direct connection to %s:%d (%s); its calls go by way of Ray, which takes longer", worker_id, *address, error
        )
        return None
