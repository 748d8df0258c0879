"""Tests of the controller's end of a channel, with scripted workers and with lost connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from helmsman._base.event_loop import run_async
from helmsman._process.pulse import find_page, observe
from helmsman._wire.auth import connect
from helmsman._wire.codec import Payload, decode, encode
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.session import HELLO, WELCOME, Session
from helmsman._wire.stream import Stream
from helmsman._wire.wire import Outgoing, ReplyFrame, encode_frame, pack_length, to_wire
from helmsman.api.errors import WorkerBacklogError
from helmsman.api.scheduler import Timeouts
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.transport import channel as channel_module
from helmsman.controller._scheduler.transport import health as health_module
from helmsman.controller._scheduler.transport.base import TransportLostError
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.controller._scheduler.transport.health import ask_health
from tests.contract.helpers import stop
from tests.hostile.conftest import MakeWorker
from tests.hostile.proxy import Proxy
from tests.hostile.worker import TAG, Worker, request

LIMIT_S = 30.0


class Outcomes:
    """An Awaited that records each outcome."""

    def __init__(self) -> None:
        self.seen: list[Payload | Exception] = []
        self.first = asyncio.Event()

    def replied(self, reply: Reply, payload: Payload) -> None:
        self.failed_or_replied(payload)

    def failed(self, error: Exception) -> None:
        self.failed_or_replied(error)

    def failed_or_replied(self, outcome: Payload | Exception) -> None:
        self.seen.append(outcome)
        self.first.set()

    async def one(self) -> Payload | Exception:
        """Wait for the first outcome."""
        await asyncio.wait_for(self.first.wait(), LIMIT_S)
        return self.seen[0]


class Unreachable:
    """Side path whose fetches do not end."""

    async def bring(self, request_id: int, payload: Payload) -> None:
        raise AssertionError

    async def fetch(self, request_id: int) -> Payload:
        await asyncio.Event().wait()
        raise AssertionError


class Ends:
    """A channel, its side path and the socket of its worker."""

    def __init__(self, channel: Channel, side_path: Unreachable, worker: socket.socket) -> None:
        self.channel = channel
        self.side_path = side_path
        self._worker = worker
        self._session = Session()

    def send(self, *replies: ReplyFrame, after: bytes = b"") -> None:
        """Send replies, and other bytes after them, so that the channel reads all at once."""
        messages = [self._session.keep(encode_frame(reply)) for reply in replies]
        self._worker.sendall(b"".join(messages) + after)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """An open channel, and the other end of its socket."""
    ours, worker = socket.socketpair()
    worker.sendall(pack_length(WELCOME.size) + WELCOME.pack(0))
    side_path, process = Unreachable(), Observed(None)

    async def connect() -> socket.socket:
        return ours

    channel = Channel("a/0", connect, process, shares_memory=True, side_path=side_path)
    await channel.open()
    with worker:
        yield Ends(channel, side_path, worker)
        channel.close()


def asked(request_id: int) -> Outgoing:
    """A small request."""
    return Outgoing(Request(request_id, Verb.HEALTH), encode(()))


def answer(request_id: int, value: object) -> ReplyFrame:
    """A reply with its result inside."""
    return ReplyFrame(Reply(request_id, True), to_wire(encode(value))[0])


async def test_channel_closed_before_a_fetch(ends: Ends) -> None:
    outcomes = Outcomes()
    ends.channel.post(asked(1), outcomes)
    # The empty message after the reply closes the channel.
    ends.send(ReplyFrame(Reply(1, True)), after=pack_length(0))
    await outcomes.one()
    assert [type(each) for each in outcomes.seen] == [TransportLostError]


async def test_channel_answer_that_cannot_be_taken(ends: Ends) -> None:
    class Leaving(Outcomes):
        def replied(self, reply: Reply, payload: Payload) -> None:
            raise SystemExit(2)

    outcomes = Outcomes()
    ends.channel.post(asked(1), Leaving())
    ends.channel.post(asked(2), outcomes)
    ends.send(answer(1, "lost"), answer(2, "taken"))
    await outcomes.one()
    assert [decode(each) for each in outcomes.seen if isinstance(each, Payload)] == ["taken"]


# --- connections that are lost --------------------------------------------------------------------


class Observed:
    """Process of a worker; only its pulse can be observed."""

    def __init__(self, worker: Worker | None) -> None:
        self.worker = worker

    async def observe(self, limit_s: float) -> bytes:
        assert self.worker is not None
        page = find_page(self.worker.process.pid, TAG)
        assert page is not None
        return await asyncio.to_thread(observe, page, self.worker.process.pid)

    async def ending(self, lost_because: str) -> Any:
        raise AssertionError

    async def wait_ended(self, limit_s: float) -> None:
        raise AssertionError

    async def kill(self) -> None:
        raise AssertionError


class Connections:
    """Makes the connections of a channel, and counts them."""

    def __init__(self, worker: Worker, port: int | None = None) -> None:
        self.num_begun = self.num_made = 0
        self._worker = worker
        self._address = worker.address if port is None else ("127.0.0.1", port)

    async def __call__(self) -> socket.socket:
        self.num_begun += 1
        made = await connect(
            self._address, self._worker.key, LIMIT_S, tls=self._worker.mode == "tls"
        )
        self.num_made += 1
        return made

    async def channel(self) -> Channel:
        """An open channel."""
        made = Channel(
            "target/0", self, Observed(self._worker), shares_memory=self._worker.mode == "unix"
        )
        await made.open()
        return made


async def _call(channel: Channel, request_id: int, target: Path) -> None:
    outcomes = Outcomes()
    channel.post(request(request_id, target), outcomes)
    assert isinstance(await outcomes.one(), Payload)


def _num_executed(target: Path) -> int:
    return len(target.read_text().splitlines())


@pytest.mark.parametrize("attempt", [0, 1])
async def test_channel_late_attempt_to_connect(
    make_worker: MakeWorker,
    tmp_path: Path,
    attempt: int,
) -> None:
    worker = make_worker("plain")
    connections = Connections(worker)
    channel = await connections.channel()
    for number in range(2):
        for each in range(3):
            await _call(channel, 10 * number + each, tmp_path / "target")
        sock = channel._socket
        assert sock is not None
        channel._drop(sock)
    await _call(channel, 50, tmp_path / "target")
    late = Stream(await connect(worker.address, worker.key, LIMIT_S))
    late.write(pack_length(HELLO.size) + HELLO.pack(channel._connector.token, attempt, 1))
    with pytest.raises(EOFError):
        await asyncio.wait_for(late.read(1), LIMIT_S)
    late.close()
    await _call(channel, 51, tmp_path / "target")
    assert (connections.num_made, _num_executed(tmp_path / "target")) == (3, 8)
    channel.close()


async def test_channel_attempts_read_late(
    make_worker: MakeWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "_GREET_S", 0.05)
    worker = make_worker("unix")
    connections = Connections(worker)
    channel = await connections.channel()
    await _call(channel, 1, tmp_path / "target")
    stop(worker.process.pid)
    sock, outcomes = channel._socket, Outcomes()
    assert sock is not None
    channel.post(request(2, tmp_path / "target"), outcomes)
    channel._drop(sock)
    connecting = connections.num_begun
    os.kill(worker.process.pid, signal.SIGCONT)
    assert isinstance(await outcomes.one(), Payload)
    assert connections.num_begun > connecting
    assert _num_executed(tmp_path / "target") == 2
    channel.close()


async def test_channel_replaces_a_silent_connection(
    make_worker: MakeWorker,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_module, "_SILENT_S", 0.1)
    worker = make_worker("tls")
    connections = Connections(worker, await proxy.relay(worker.address[1]))

    async def call_through_silence() -> None:
        channel = await connections.channel()
        client = WorkerClient(
            "target/0", Placement(node="127.0.0.1"), worker.process.pid, "", channel, Timeouts()
        )
        proxy.silence()
        outcomes = Outcomes()
        channel.post(request(1 << 40, tmp_path / "target"), outcomes)
        async with asyncio.timeout(LIMIT_S):
            while not outcomes.seen:
                found, _ = await ask_health({"target/0": client}, LIMIT_S, "a test")
                assert found["target/0"].stuck_s is None or found["target/0"].stuck_s < 1.0
        found, _ = await ask_health({"target/0": client}, LIMIT_S, "a test")
        assert found["target/0"].answered
        channel.close()

    await run_async(call_through_silence())
    assert (connections.num_made, _num_executed(tmp_path / "target")) == (2, 1)


async def test_channel_limits_requests_to_a_stopped_worker(
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "backlog_limit_bytes", lambda: 3 << 20)
    worker = make_worker("unix")
    channel = await Connections(worker).channel()
    stop(worker.process.pid)
    outcomes = [Outcomes() for _ in range(3)]
    for number, each in enumerate(outcomes):
        channel.post(
            Outgoing(Request(number + 1, Verb.CALL, "a", "take"), encode((bytes(4 << 20),))), each
        )
    for each in outcomes[1:]:
        error = await each.one()
        assert isinstance(error, WorkerBacklogError)
        assert str(error).startswith("target/0: a.take was not sent (")
        assert "Await earlier calls before making more" in str(error)
    health = Outcomes()
    channel.post(asked(8), health)
    os.kill(worker.process.pid, signal.SIGCONT)
    assert isinstance(await outcomes[0].one(), Payload), "one message may be of any size"
    assert isinstance(await health.one(), Payload), "the limit is for engine calls alone"
    last = Outcomes()
    channel.post(Outgoing(Request(9, Verb.CALL, "a", "take"), encode((bytes(4 << 20),))), last)
    assert isinstance(await last.one(), Payload)
    channel.close()
