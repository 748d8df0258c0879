"""Tests of connections between supervisors: messages, loss and authentication."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from helmsman._cluster.connection import (
    Ended,
    Heartbeat,
    Hello,
    Joined,
    Leaving,
    LinkTimeouts,
    PeerConnection,
    PeerLostError,
    Refused,
    SupervisorMessage,
    Waiting,
    Welcome,
    connect,
    proof_key,
)
from helmsman._wire import auth
from helmsman._wire.door import Door
from helmsman._wire.stream import Stream
from helmsman._wire.tls import server_tls
from helmsman.api.errors import ProtocolError
from helmsman.api.refusals import RefusalLog

KEY = proof_key("a token of this test", "")
USUAL = LinkTimeouts()
BRIEF = LinkTimeouts(connect_s=0.2, heartbeat_s=0.1, silent_s=0.2)
ALL = [
    Hello(
        rank=3,
        count=4,
        hostname="gpu-3",
        address="10.0.0.4",
        versions={"ray": "2"},
        num_devices=8,
        device_kind="GPU",
    ),
    Refused("its rank is taken"),
    Welcome(
        run_id="run-1",
        address="10.0.0.1:6379",
        variables={"RAY_worker_niceness": "0"},
        token="secret",
    ),
    Joined(),
    Waiting("1 of 4 nodes is missing: rank 2, wo bleibt er? ☎"),
    Ended("the script has ended"),
    Leaving("stopped by a signal", signal=15),
]
TLS = server_tls()


class Listener:
    """Listening socket of a head, which authenticates its peers once it is open."""

    def __init__(self, *, tls: bool = True) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.uses_tls = tls
        self._door: Door | None = None
        self._admitted: asyncio.Queue[Stream] = asyncio.Queue()
        self.port: int = self._socket.getsockname()[1]
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        """Reports of refused connections."""

    async def accept(self) -> socket.socket:
        """Accept the next connection without authentication."""
        return (await asyncio.get_running_loop().sock_accept(self._socket))[0]

    def open(self, key: bytes = KEY) -> None:
        """Accept peers that have this key."""
        self._door = Door(
            self._socket,
            key,
            tls=TLS if self.uses_tls else None,
            admit=lambda stream, host: self._admitted.put_nowait(stream),
            refusals=RefusalLog(self.refused.put_nowait),
        )

    async def link(self, timeouts: LinkTimeouts = USUAL) -> PeerConnection:
        """Return the next authenticated connection."""
        if self._door is None:
            self.open()
        return PeerConnection(await self._admitted.get(), timeouts)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._socket.close()


@pytest.fixture(params=[True, False], ids=["tls", "plain"])
async def listener(request: pytest.FixtureRequest) -> AsyncIterator[Listener]:
    made = Listener(tls=request.param)
    yield made
    made.close()


async def connected(listener: Listener, timeouts: LinkTimeouts = USUAL) -> PeerConnection:
    """Connect as a node."""
    return await connect("127.0.0.1", listener.port, KEY, timeouts, tls=listener.uses_tls)


@contextlib.asynccontextmanager
async def linked(
    listener: Listener, timeouts: LinkTimeouts = USUAL
) -> AsyncIterator[tuple[PeerConnection, PeerConnection]]:
    """Yield the head's and the node's end of a connection."""
    accepting = asyncio.ensure_future(listener.link(timeouts=timeouts))
    theirs = await connected(listener, timeouts)
    ours = await accepting
    try:
        yield ours, theirs
    finally:
        await ours.close()
        await theirs.close()


@contextlib.asynccontextmanager
async def raw(
    listener: Listener, timeouts: LinkTimeouts = USUAL
) -> AsyncIterator[tuple[PeerConnection, socket.socket]]:
    """Yield the head's end of a connection, and the socket of its authenticated peer."""
    accepting = asyncio.ensure_future(listener.link(timeouts=timeouts))
    peer = await auth.connect(("127.0.0.1", listener.port), KEY, 5.0, tls=listener.uses_tls)
    peer.setblocking(True)
    ours = await accepting
    try:
        yield ours, peer
    finally:
        peer.close()
        await ours.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


# --- messages -------------------------------------------------------------------------------------


async def test_connection_carries_every_message_in_order(listener: Listener) -> None:
    assert {type(message) for message in ALL} | {Heartbeat} == set(
        SupervisorMessage.__subclasses__()
    )
    async with linked(listener) as (ours, theirs):
        for message in ALL:
            ours.send(message)
            theirs.send(message)
        assert [await theirs.receive() for _ in ALL] == ALL
        assert not theirs.is_silent
        await theirs.close()
        assert [await ours.receive() for _ in ALL] == ALL
        with pytest.raises(PeerLostError, match="the connection was closed"):
            await ours.receive()


async def test_receive_loses_no_message_when_cancelled(listener: Listener) -> None:
    """The next receive() continues in the middle of a message."""
    message = framed(msgspec.msgpack.encode(Waiting("1 of 4")))
    async with raw(listener) as (ours, peer):
        for part in (message[:2], message[2:6], message[6:9]):
            peer.sendall(part)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ours.receive(), 0.05)
        peer.sendall(message[9:])
        assert await ours.receive() == Waiting("1 of 4")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (framed(b"\xc1"), "a message of another version of Helmsman"),
        (
            framed(msgspec.msgpack.encode({"type": "Dance", "step": 1})),
            "another version of Helmsman.*Dance",
        ),
        (framed(msgspec.msgpack.encode({"type": "Waiting"})), "another version of Helmsman.*text"),
        (b"\xff\xff\xff\xff", "a message of -1 bytes was announced, expected at most 1048576"),
        (b"\x00\x00\x00\x09abc", "the connection was closed"),
    ],
    ids=["invalid", "unknown type", "missing field", "too long", "cut off"],
)
async def test_receive_invalid_message(listener: Listener, data: bytes, error: str) -> None:
    async with raw(listener) as (ours, peer):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLostError, match=error):
            await ours.receive()


# --- loss -----------------------------------------------------------------------------------------


async def test_heartbeats_keep_a_connection(listener: Listener) -> None:
    timeouts = LinkTimeouts(heartbeat_s=0.02, silent_s=0.5)
    async with linked(listener, timeouts) as (ours, theirs):
        reading = asyncio.ensure_future(theirs.receive())
        done, _ = await asyncio.wait({reading}, timeout=1.5 * timeouts.silent_s)
        assert not done
        ours.send(Joined())
        assert await reading == Joined()


@pytest.mark.parametrize("sent", [b"", framed(b"x" * 100)[:50]], ids=["nothing", "half a message"])
async def test_connection_to_a_silent_peer(listener: Listener, sent: bytes) -> None:
    """A stopped process or a lost network closes no connection."""
    async with raw(listener, BRIEF) as (ours, peer):
        peer.sendall(sent)
        with pytest.raises(PeerLostError, match=r"no data was received for 0\.2 s"):
            await ours.receive()
        assert ours.is_silent


async def test_connection_to_a_peer_that_exits_or_reads_nothing(listener: Listener) -> None:
    async with raw(listener) as (ours, peer), asyncio.timeout(10.0):
        for _ in range(200):
            ours.send(Waiting("x" * 100_000))
        peer.close()
        with pytest.raises(PeerLostError):
            await ours.receive()
        ours.send(Joined())
        await ours.close()
        ours.send(Joined())
    async with raw(listener) as (ours, peer), asyncio.timeout(10.0):
        for _ in range(200):
            ours.send(Waiting("x" * 100_000))
        await ours.close()


# --- authentication -------------------------------------------------------------------------------


async def test_connect_with_tls_on_one_end_only(listener: Listener) -> None:
    listener.open()
    there, here = ("uses TLS", "does not") if listener.uses_tls else ("does not use TLS", "does")
    error = (
        f"127.0.0.1:{listener.port} {there}, and this one {here}. Set HELMSMAN_TLS to the same "
        "value"
    )
    with pytest.raises(ProtocolError, match=error):
        await connect("127.0.0.1", listener.port, KEY, USUAL, tls=not listener.uses_tls)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_connect_to_an_invalid_host_name(host: str) -> None:
    with pytest.raises(OSError, match=f"'{host}' is not a valid host name"):
        await connect(host, 6380, KEY, USUAL, tls=True)


async def test_connect_to_a_silent_head(listener: Listener) -> None:
    """The kernel accepts connections for a head that is stopped or overloaded."""
    with pytest.raises(PeerLostError, match="it accepts a connection, and is silent"):
        await connected(listener, BRIEF)


async def test_connect_to_a_head_that_ends(listener: Listener) -> None:
    async def hang_up() -> None:
        (await listener.accept()).close()

    ending = asyncio.ensure_future(hang_up())
    with pytest.raises(PeerLostError, match="or closes it"):
        await connected(listener)
    await ending


@pytest.mark.parametrize(
    "greeting",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x04data",
        b"helmsman 0" + b"x" * 99,
    ],
)
async def test_connect_to_another_program(listener: Listener, greeting: bytes) -> None:
    connecting = asyncio.ensure_future(connected(listener))
    with await listener.accept() as peer:
        peer.sendall(greeting)
        with pytest.raises(
            ProtocolError,
            match=f"127.0.0.1:{listener.port} did not prove that it belongs to this run",
        ):
            await connecting


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" + b"\xff" * 8, b"\x00\x00"]
)
async def test_door_refuses_another_program(listener: Listener, greeting: bytes) -> None:
    """Examples are a port scanner, a browser, and a peer that closes within a message."""
    listener.open()
    with socket.create_connection(("127.0.0.1", listener.port)) as peer:
        peer.sendall(greeting)
        peer.shutdown(socket.SHUT_WR)
        assert await listener.refused.get() == (
            "a process on 127.0.0.1 was refused: it did not prove that it belongs to this run"
        )
        assert await asyncio.to_thread(ended, peer)


async def test_door_closes_beside_a_silent_peer(listener: Listener) -> None:
    """close() closes the connection of a peer that sends nothing."""
    listener.open()
    with socket.create_connection(("127.0.0.1", listener.port)) as peer:
        peer.settimeout(10.0)
        assert await asyncio.to_thread(peer.recv, 8) == b"helmsman"  # the peer is connected
        listener.close()
        assert await asyncio.to_thread(ended, peer)


def ended(peer: Any) -> bool:
    """Wait until the other end closes the connection; fail after 10 s."""
    peer.settimeout(10.0)
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            continue
    return True
