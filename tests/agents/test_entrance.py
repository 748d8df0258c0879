"""Tests of the limits on connections whose peers have not shown a key, with short times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest

from helmsman.agents._entrance import Entrance, EntranceLimits, Verdict, in_use
from helmsman.api.refusals import RefusalLog

REFUSED = b"refused\n"
GOOD = b"good: key\r\n\r\n"
LONG_S = 3600.0


class Echo(asyncio.Protocol):
    """Serves the peers that have a key."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Busy(Echo):
    """Has a request in progress until its connection ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.request = in_use(transport)
        self.request.__enter__()


class World:
    """An entrance with limits, its port and its log."""

    def __init__(self, make: type[Echo], limits: EntranceLimits) -> None:
        self.lines: list[str] = []
        listener = socket.create_server(("0.0.0.0", 0))
        self.port: int = listener.getsockname()[1]
        self.entrance = Entrance(
            [listener], self.judge, make, RefusalLog(self.lines.append, LONG_S), limits
        )

    def judge(self, head: bytes) -> Verdict | None:
        return None if head.startswith(b"good") else Verdict("was refused", REFUSED)

    async def connect(
        self, address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))


@contextlib.asynccontextmanager
async def world(
    make: type[Echo] = Echo,
    max_unknown: int = 100,
    head_s: float = LONG_S,
    grace_s: float = 0.0,
    linger_s: float = LONG_S,
) -> AsyncIterator[World]:
    made = World(
        make,
        EntranceLimits(max_unknown=max_unknown, head_s=head_s, grace_s=grace_s, linger_s=linger_s),
    )
    yield made
    await made.entrance.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return all that arrives until the server has ended the connection."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_head_in_pieces() -> None:
    async with world() as made:
        reader, writer = await made.connect()
        for byte in GOOD:
            writer.write(bytes([byte]))
            await writer.drain()
        assert await reader.readexactly(len(GOOD)) == GOOD
        writer.write(b"more")
        assert await reader.readexactly(4) == b"more"
        writer.close()
    assert made.lines == []


async def test_refused_peer_gets_answer_while_it_sends() -> None:
    async with world() as made:
        reader, writer = await made.connect()
        writer.write(b"bad\r\n\r\n" + bytes(500_000))
        await writer.drain()
        assert await reader.read() == REFUSED
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(100_000))
                await writer.drain()
    assert made.lines == ["a process on 127.0.0.1 was refused: it was refused"]


async def test_times_of_peers_without_key() -> None:
    async with world(head_s=0.05, linger_s=0.05) as made:
        for data in (b"", b"good", b"bad\r\n\r\n"):
            reader, writer = await made.connect()
            writer.write(data)
            assert await ended(reader) in (b"", REFUSED)
            writer.close()
    assert made.lines[0] == ("a process on 127.0.0.1 was refused: it showed no key within 0.05 s")


async def test_head_too_long() -> None:
    async with world() as made:
        reader, writer = await made.connect()
        writer.write(b"good" * 10_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()
    assert made.lines == ["a process on 127.0.0.1 was refused: it sent a head of more than 32 KiB"]


async def test_newer_peers_evict_those_of_the_busiest_address() -> None:
    async with world(max_unknown=4) as made:
        other, kept = await made.connect("127.0.0.2")
        first, *_ = [await made.connect() for _ in range(4)]
        assert await ended(first[0]) == b""
        kept.write(GOOD)
        assert await other.readexactly(len(GOOD)) == GOOD
    assert made.lines[0] == (
        "a process on 127.0.0.1 was refused: it had shown no key when newer connections evicted it"
    )


async def test_peers_wait_for_the_time_of_others() -> None:
    async with world(max_unknown=2, grace_s=LONG_S) as made:
        peers = [await made.connect() for _ in range(20)]
        for _, writer in peers:
            writer.write(GOOD)
        for reader, _ in peers:
            assert await reader.readexactly(len(GOOD)) == GOOD
    assert made.lines == []


@pytest.fixture
def few_files() -> Iterator[None]:
    """Leave this process some descriptors beyond those that it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * highest + 64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("make", [Echo, Busy])
async def test_descriptors_in_reserve(make: type[Echo]) -> None:
    async with world(make=make) as made:
        peers = []
        while not made.lines:
            reader, writer = await made.connect()
            writer.write(GOOD)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readexactly(len(GOOD))
            peers.append((reader, writer))
        first, last = peers[0][0], peers[-1][0]
        assert await ended(last if make is Busy else first) == b""
        for _, writer in peers:
            writer.close()
    event = "came" if make is Busy else "was idle"
    assert made.lines[0] == (
        f"a process on 127.0.0.1 was refused: it {event} while only the script's reserve of "
        "descriptors was left. Raise the limit of open files (ulimit -n)"
    )
