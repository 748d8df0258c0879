"""Tests of a worker's channel: its port, and the threads that read and answer its requests."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman._wire.auth import connect
from helmsman._wire.codec import decode, encode
from helmsman._wire.messages import Request, Verb, WorkerIdentity
from helmsman._wire.wire import (
    HELLO,
    FrameReader,
    RequestFrame,
    Session,
    decode_reply,
    decode_request,
    encode_frame,
    from_wire,
    pack_length,
    to_wire,
)
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._server import channel
from helmsman.rpc_server._server.channel import (
    ChannelServer,
    abstract_address,
    listen_abstract,
    listen_tcp,
)

LIMIT_S = 30.0
KEY = b"k" * 32


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port at which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_listen_tcp_free_port_of_range(busy_port: int) -> None:
    with listen_tcp("127.0.0.1", range(busy_port, busy_port + 50)) as first:
        port = first.getsockname()[1]
        assert busy_port < port < busy_port + 50


def test_listen_tcp_without_free_port(busy_port: int) -> None:
    expected = (
        f"none of the ports {busy_port}-{busy_port} of 127.0.0.1 is free .* set "
        "HELMSMAN_PORT_RANGE to a wider range"
    )
    with pytest.raises(OSError, match=expected):
        listen_tcp("127.0.0.1", range(busy_port, busy_port + 1))


# --- threads --------------------------------------------------------------------------------------


class Held:
    """An engine whose call waits."""

    begun, released = threading.Semaphore(0), threading.Semaphore(0)

    def begin(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        self.begun.release()
        self.released.acquire(timeout=LIMIT_S)


class Client:
    """The other end of a channel."""

    def __init__(self, path: str) -> None:
        self._socket = asyncio.run(connect(path, KEY, LIMIT_S))
        self._socket.settimeout(LIMIT_S)
        self._session, self._reader = Session(), FrameReader()
        self._messages: list[bytes] = []
        self.send_bytes(pack_length(HELLO.size) + HELLO.pack(bytes(16), 0, 0))
        self._next()

    def send_bytes(self, data: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def _next(self) -> bytes:
        while not self._messages:
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages = self._reader.feed(data)
        return self._messages.pop(0)

    def send(self, request_id: int, verb: Verb, arguments: Any, method: str = "") -> None:
        """Send a request."""
        frame = RequestFrame(
            Request(request_id, verb, "engine", method), to_wire(encode(arguments))[0]
        )
        self.send_bytes(self._session.keep(encode_frame(frame)))

    def reply(self) -> tuple[int, Any]:
        """Wait for a reply; return the id of its request and the result."""
        body = self._session.take(self._next())
        self._session.taken(len(body), None)
        frame = decode_reply(body)
        assert frame.reply.ok
        assert frame.payload is not None
        return frame.reply.id, decode(from_wire(frame.payload))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@pytest.fixture
def host() -> Iterator[EngineHost]:
    """A host whose engine thread runs."""
    identity = WorkerIdentity(run_id="run", worker_id="a/0", role="a", rank=0)
    made = EngineHost(identity, SegmentStore(), seeding=False)
    made.engine_thread.start("engine")
    yield made
    made.close()


@pytest.fixture
def path(host: EngineHost) -> Iterator[str]:
    """Address of a server whose requests the engine thread reads while it is idle."""
    address = abstract_address()
    server = ChannelServer(
        listen_abstract(address), KEY, host, shares_memory=True, engine_thread=host.engine_thread
    )
    server.start()
    yield address
    server.close()


@pytest.fixture
def client(path: str) -> Iterator[Client]:
    """A client, with an engine of class Held."""
    made = Client(path)
    made.send(1, Verb.CREATE_ENGINE, (Held, (), {}))
    assert made.reply() == (1, None)
    yield made
    made.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    """Names of the threads that read requests."""
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def noted(body: memoryview) -> RequestFrame:
        names.put(threading.current_thread().name)
        return decode_request(body)

    monkeypatch.setattr(channel, "decode_request", noted)
    return names


def await_reader(client: Client, threads: queue.SimpleQueue[str]) -> None:
    """Make calls until the engine thread, which is idle after each, reads them."""
    for request_id in range(100, 10_000):
        client.send(request_id, Verb.CALL, ((), {}), "begin")
        assert client.reply() == (request_id, None)
        if threads.get(timeout=LIMIT_S) == "engine":
            return
    raise AssertionError


def test_engine_thread_reads_while_it_is_idle(
    client: Client, threads: queue.SimpleQueue[str]
) -> None:
    await_reader(client, threads)
    client.send(2, Verb.CALL, ((), {}), "wait")
    assert Held.begun.acquire(timeout=LIMIT_S)
    assert threads.get(timeout=LIMIT_S) == "engine"
    client.send(3, Verb.INSPECT, ([2],))
    request_id, seen = client.reply()
    assert (request_id, seen[2].state) == (3, "running"), "it is answered beside the call"
    assert threads.get(timeout=LIMIT_S) == "connection"
    client.send(4, Verb.CALL, ((), {}), "wait")
    Held.released.release(2)
    assert [client.reply()[0] for _ in range(2)] == [2, 4]
    Held.begun.acquire()


def test_engine_thread_answers_no_control_verb(
    host: EngineHost,
    client: Client,
    threads: queue.SimpleQueue[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a verb may run code of an engine, behind which no call may wait."""
    named: list[str] = []
    monkeypatch.setattr(host, "health", lambda: named.append(threading.current_thread().name))
    await_reader(client, threads)
    client.send(2, Verb.HEALTH, ())
    client.reply()
    assert (threads.get(timeout=LIMIT_S), named) == ("engine", ["connection"])


def test_engine_thread_that_reads_begins_other_work(
    host: EngineHost, client: Client, threads: queue.SimpleQueue[str]
) -> None:
    await_reader(client, threads)
    for _ in range(3):
        done = threading.Event()
        host.engine_thread.submit(object(), "work of another thread", done.set)
        assert done.wait(LIMIT_S)
    await_reader(client, threads)


def test_engine_thread_reads_a_broken_message(
    path: str, client: Client, threads: queue.SimpleQueue[str], capfd: pytest.CaptureFixture[str]
) -> None:
    await_reader(client, threads)
    client.send_bytes(pack_length(3) + b"bad")
    with pytest.raises(EOFError):
        client.reply()
    assert "closed a connection that broke the protocol" in capfd.readouterr().err
    other = Client(path)
    await_reader(other, threads)
    other.close()
