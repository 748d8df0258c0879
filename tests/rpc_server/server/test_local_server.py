"""Tests that a local worker's socket accepts only peers of its run, and survives other bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman._wire import auth, wire
from helmsman._wire.codec import encode
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.wire import WirePayload, to_wire
from helmsman.api.errors import CodecError, ProtocolError, WorkerFailedError
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.rpc_server._server.channel import ChannelServer
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, wait_until

NUM_MESSAGES = 2_000


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalScheduler]:
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        yield made


@pytest.fixture(scope="module")
def engine(scheduler: LocalScheduler) -> Engine:
    (worker,) = scheduler.create_workers(Job(role="target"))
    return Engine.create(scheduler, worker, Counter)


@pytest.fixture
def path(scheduler: LocalScheduler) -> str:
    """The worker's abstract address."""
    (status,) = scheduler.status()
    sockets = psutil.Process(status.pid).net_connections("unix")
    (address,) = {each.laddr for each in sockets if str(each.laddr).startswith("@helmsman-")}
    return str(address).replace("@", "\0")


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


def _frames(target: str) -> list[bytes]:
    """Return messages of an authenticated peer, some of which contain a bomb."""
    payload = to_wire(encode(((Bomb(target),), {})))[0]
    handles = WirePayload(pickle.dumps(()), [], [], pickle.dumps([Bomb(target)]), None)
    requests = [
        Request(1, Verb.CALL, "target/0", "add"),
        Request(2, Verb.SHUTDOWN),
        Request(3, Verb.HEALTH),
    ]
    asked = [
        wire.RequestFrame(request, each) for request in requests for each in (payload, handles)
    ]
    messages = [struct.pack("!q", 0) + wire.encode_frame(frame) for frame in asked]
    welcome = b"#WELCOME#"
    digests = [
        os.urandom(64),
        b"helmsman plain\n" + os.urandom(64),
        pickle.dumps(Bomb(target)),
        welcome,
    ]
    return [struct.pack("!i", len(each)) + each for each in messages + digests]


def _mutated(message: bytes, rng: random.Random) -> bytes:
    data = bytearray(message)
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 2:  # an invalid length, or one of missing bytes
        size = rng.choice([-1, -2, -(2**31), 2**31 - 1, 1 << 30, (1 << 30) + 1, 0])
        return struct.pack("!i", size) + bytes(data[4:])
    if kind == 3:  # Connection's escape for more than 2 GiB
        return struct.pack("!iQ", -1, rng.choice([0, 5, 2**40, 2**63, 2**64 - 1])) + bytes(data[4:])
    for _ in range(rng.randrange(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _send(path: str, messages: list[bytes]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(5)
        try:
            peer.connect(path)
            for message in messages:
                peer.sendall(message)
        except (ConnectionError, TimeoutError, BlockingIOError):
            return  # the server has closed the connection, or its backlog is full


def test_local_server_foreign_bytes(engine: Engine, path: str, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    frames = _frames(str(target))
    rng = random.Random(7)
    messages = [
        _mutated(rng.choice(frames), rng) for _ in range(NUM_MESSAGES - 10 * len(frames))
    ] + 10 * frames
    rng.shuffle(messages)
    batches = [messages[start : start + 4] for start in range(0, len(messages), 4)]
    with held(engine, Gate(tmp_path), timeout=100) as running, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda batch: _send(path, batch), batches))
        assert not running.done()
        (status,) = engine.scheduler.status()
        assert status.health is not None
        assert status.health.running == "target/0.wait"
        assert status.health.num_queued == 0
    assert running.result(timeout=LIMIT_S) == 1
    assert not target.exists(), "nothing was unpickled"
    assert engine.call("add", 0) == 1


def connect(path: str, key: bytes, limit_s: float) -> socket.socket:
    """Connect and authenticate."""
    return asyncio.run(auth.connect(path, key, limit_s))


def test_connect_full_backlog(tmp_path: Path) -> None:
    with contextlib.ExitStack() as sockets, ThreadPoolExecutor(1) as pool:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).connect(
            str(tmp_path / "s")
        )
        with pytest.raises(BlockingIOError):
            connect(str(tmp_path / "s"), b"x" * 32, 0.01)
        connecting = pool.submit(connect, str(tmp_path / "s"), b"x" * 32, LIMIT_S)
        for _ in range(2):
            listener.accept()[0].close()
        with pytest.raises(ProtocolError):
            connecting.result(LIMIT_S)


def test_local_server_invalid_bytes_of_own_peer(
    scheduler: LocalScheduler, engine: Engine, path: str
) -> None:
    """Invalid bytes of an authenticated peer end only its connection."""
    proved = connect(path, scheduler._backend._key, 5.0)  # type: ignore[attr-defined]
    with proved:
        proved.sendall(struct.pack("!i", 5) + b"\xc1\xc1\xc1\xc1\xc1")
        proved.settimeout(LIMIT_S)
        assert proved.recv(1) == b""
    assert engine.call("add", 0) >= 0


class WrongReplies(Counter):
    """Sends invalid replies."""

    def answer_for(self, request_id: int, payload: WirePayload) -> None:
        """Reply to a pending request of another call."""
        (server,) = (each for each in gc.get_objects() if type(each) is ChannelServer)
        (peer,) = server._peers.values()
        peer.send(wire.encode_frame(wire.ReplyFrame(Reply(request_id, False), payload)), None)


@pytest.mark.parametrize(
    "payload", [WirePayload(b"invalid"), WirePayload(b"invalid", handles=b"invalid")]
)
def test_transport_invalid_reply(
    scheduler: LocalScheduler, payload: WirePayload, tmp_path: Path
) -> None:
    (worker,) = scheduler.create_workers(Job(role="wrong"))
    try:
        engine = Engine.create(scheduler, worker, WrongReplies)
        with held(engine, Gate(tmp_path), "async_wait") as answered_falsely:
            (request_id,) = scheduler._roles.client(worker).transport._awaited  # type: ignore[attr-defined]
            engine.call("answer_for", request_id, payload)
            with pytest.raises((CodecError, pickle.UnpicklingError)):
                answered_falsely.result(LIMIT_S)
            assert engine.call("add") == 2
    finally:
        scheduler.delete_workers("wrong")


class Busy(Counter):
    """Has a task on the event loop."""

    async def begin(self, ended: str) -> None:
        """Start a task that creates a file when it is cancelled."""

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                Path(ended).touch()

        self.work = asyncio.create_task(work())
        await asyncio.sleep(0)


def test_worker_end_cancels_event_loop_tasks(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        (worker,) = scheduler.create_workers(Job(role="busy"))
        engine = Engine.create(scheduler, worker, Busy)
        engine.call("begin", str(ended))
        call = engine.begin("async_wait", str(started), str(tmp_path / "never"))
        wait_until(started.exists, "the call is in flight")
        scheduler.delete_workers("busy")
        assert isinstance(call.exception(LIMIT_S), WorkerFailedError), "the engine has not replied"
        assert ended.exists()
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    assert "pending" not in logs, logs
