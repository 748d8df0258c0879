"""The controller's end of a channel, against a worker's end of a few bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from helmsman.api.errors import ProtocolError
from helmsman.controller._transport.base import Ending, TransportLostError
from helmsman.controller._transport.channel import Channel, ChannelTransport
from helmsman.rpc_server._wire.codec import Payload, ResultHandle, decode, encode
from helmsman.rpc_server._wire.messages import Reply, Request, Verb
from helmsman.rpc_server._wire.wire import WELCOME, Outgoing, ReplyFrame, Session, encode_frame, pack_length, to_wire

LIMIT_S = 5.0


class Outcomes:
    """An Awaited that keeps each outcome."""

    def __init__(self) -> None:
        self.seen: list[Payload | Exception] = []
        self.first = asyncio.Event()

    def replied(self, reply: Reply, payload: Payload) -> None:
        """As Awaited's."""
        self.seen.append(payload)
        self.first.set()

    def failed(self, error: Exception) -> None:
        """As Awaited's."""
        self.seen.append(error)
        self.first.set()


class Unreachable:
    """A side path whose fetches do not end."""

    def __init__(self) -> None:
        self.brought: list[int] = []

    async def bring(self, request_id: int, payload: Payload) -> None:
        """As SidePath's."""
        self.brought.append(request_id)

    async def fetch(self, request_id: int) -> Payload:
        """As SidePath's."""
        await asyncio.Event().wait()
        raise AssertionError


class Unused:
    """A worker process with which nothing is done."""

    async def ending(self, lost_because: str) -> Ending:
        """As WorkerProcess's."""
        raise AssertionError

    async def observe(self, limit_s: float) -> bytes:
        """As WorkerProcess's."""
        raise AssertionError

    async def wait_ended(self, limit_s: float) -> None:
        """As WorkerProcess's."""

    async def kill(self) -> None:
        """As WorkerProcess's."""


class Ends:
    """A channel and the socket of its worker."""

    def __init__(self, channel: Channel, worker: socket.socket) -> None:
        self.channel = channel
        self._worker = worker
        self._session = Session()

    def send(self, *replies: ReplyFrame, after: bytes = b"") -> None:
        """Send replies, and other bytes after them, so that the channel reads all at once."""
        messages = [self._session.keep(encode_frame(reply)) for reply in replies]
        self._worker.sendall(b"".join(messages) + after)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A channel that is open."""
    ours, worker = socket.socketpair()
    worker.sendall(pack_length(WELCOME.size) + WELCOME.pack(0))

    async def connect() -> socket.socket:
        return ours

    channel = Channel("a/0", connect, shares_memory=True, side_path=Unreachable())
    await channel.open()
    with worker:
        yield Ends(channel, worker)
        channel.close()


def answer(request_id: int, value: object) -> ReplyFrame:
    """A reply with its result inside."""
    return ReplyFrame(Reply(request_id, True), to_wire(encode(value))[0])


async def test_channel_closed_before_a_fetch_begins_fails_the_call(ends: Ends) -> None:
    outcomes = Outcomes()
    ends.channel.write(1, b"request", outcomes)
    ends.send(ReplyFrame(Reply(1, True)), after=pack_length(0))  # the reply, and nonsense for which the channel closes
    await asyncio.wait_for(outcomes.first.wait(), LIMIT_S)
    assert [type(each) for each in outcomes.seen] == [TransportLostError]


async def test_answer_that_cannot_be_taken_does_not_cost_the_next(ends: Ends) -> None:
    class Leaving(Outcomes):
        def replied(self, reply: Reply, payload: Payload) -> None:
            raise SystemExit(2)

    outcomes = Outcomes()
    ends.channel.write(1, b"request", Leaving())
    ends.channel.write(2, b"request", outcomes)
    ends.send(answer(1, "lost"), answer(2, "taken"))
    await asyncio.wait_for(outcomes.first.wait(), LIMIT_S)
    assert [decode(each) for each in outcomes.seen if isinstance(each, Payload)] == ["taken"]


async def test_request_that_cannot_be_encoded_leaves_no_arguments_in_the_worker(ends: Ends) -> None:
    side_path, outcomes = Unreachable(), Outcomes()
    transport = ChannelTransport(ends.channel, Unused(), side_path)
    handle = ResultHandle(worker_id="a/0", id="kept", location="elsewhere", nbytes=1, summary="")
    transport.post(Outgoing(Request(1, Verb.CALL, "engine", "\ud800"), encode(handle)), outcomes)
    await asyncio.wait_for(outcomes.first.wait(), LIMIT_S)
    (error,) = outcomes.seen
    assert isinstance(error, ProtocolError)
    assert "cannot be encoded" in str(error)
    assert not side_path.brought
