"""Tests that peers without the key cannot use a worker's channel, and do not delay other peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helmsman._wire.auth import HANDSHAKE_LIMIT_S, connect
from helmsman._wire.codec import Payload
from helmsman._wire.door import MAX_PENDING_OF_HOST
from helmsman._wire.messages import Reply
from helmsman.api.errors import ProtocolError
from helmsman.controller._scheduler.transport.channel import Channel
from tests.contract.helpers import LIMIT_S, wait_until
from tests.hostile.conftest import MakeWorker
from tests.hostile.peers import KINDS, NUM_LEGITIMATE, peers_of_kind
from tests.hostile.proxy import GREETING, Proxy
from tests.hostile.worker import Worker, request, request_frame


class Answer:
    """A request that waits for its reply."""

    def __init__(self) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def replied(self, reply: Reply, payload: Payload) -> None:
        self.future.set_result(True)

    def failed(self, error: Exception) -> None:
        self.future.set_exception(error)


class Controller:
    """A controller's end of the channel."""

    def __init__(self, worker: Worker, port: int | None, *, reconnects: bool) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Settled when the connection is lost and no other replaces it."""
        self.num_connections = 0
        self._reconnects = reconnects
        self._worker = worker
        self._address = worker.address if port is None else ("127.0.0.1", port)
        self._num_requests = 0
        process: Any = None  # the channel does not use it
        self.channel = Channel(
            "target/0", self._connect, process, shares_memory=worker.mode == "unix"
        )

    @classmethod
    async def of(
        cls, worker: Worker, port: int | None = None, *, reconnects: bool = False
    ) -> Controller:
        """Connect, by way of a proxy's port where one is given."""
        controller = cls(worker, port, reconnects=reconnects)
        await controller.channel.open()
        return controller

    async def _connect(self) -> socket.socket:
        self.num_connections += 1
        if self.num_connections > 1 and not self._reconnects:
            self.lost.set_result(None)
            await asyncio.Event().wait()
        return await connect(
            self._address, self._worker.key, LIMIT_S, tls=self._worker.mode == "tls"
        )

    def send(self, target: Path) -> Answer:
        """Send a request that adds a line to a file."""
        self._num_requests += 1
        answer = Answer()
        self.channel.post(request(self._num_requests, target), answer)
        return answer

    async def call(self, target: Path) -> None:
        """Send such a request, and await the answer."""
        await asyncio.wait_for(self.send(target).future, LIMIT_S)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """File to which each executed request adds a line."""
    return tmp_path / "executed"


def num_executed(target: Path) -> int:
    return len(target.read_text().splitlines()) if target.exists() else 0


# --- a relay without the key ----------------------------------------------------------------------


async def test_channel_relay_drops_connections(worker: Worker, proxy: Proxy, target: Path) -> None:
    controller = await Controller.of(worker, await proxy.relay(worker.address[1]), reconnects=True)
    for number in range(2, 7):
        answers = [controller.send(target) for _ in range(20)]
        proxy.drop()
        await asyncio.wait_for(asyncio.gather(*(answer.future for answer in answers)), LIMIT_S)
        await controller.call(target)
        assert controller.num_connections == number
    assert num_executed(target) == 105, "each is executed once"
    controller.channel.close()


@pytest.mark.parametrize("attack", ["inject", "replay", "alter"])
async def test_channel_relay_attacks_tls(
    make_worker: MakeWorker, proxy: Proxy, target: Path, attack: str
) -> None:
    """A foreign, repeated or altered frame only ends the connection."""
    worker = make_worker("tls")
    controller = await Controller.of(worker, await proxy.relay(worker.address[1]))
    begun = len(proxy.sent)
    await controller.call(target)
    if attack == "alter":
        proxy.alter = True
        controller.send(target)
    else:
        proxy.inject(request_frame(99, target) if attack == "inject" else bytes(proxy.sent[begun:]))
    await asyncio.wait_for(controller.lost, LIMIT_S)
    await (await Controller.of(worker)).call(target)
    assert num_executed(target) == 2


async def test_channel_relay_injects_frame_without_tls(
    make_worker: MakeWorker, proxy: Proxy, target: Path
) -> None:
    """Without TLS a relay can add frames, as the documentation of HELMSMAN_TLS=0 says."""
    worker = make_worker("plain")
    await Controller.of(worker, await proxy.relay(worker.address[1]))
    proxy.inject(request_frame(99, target))
    await asyncio.to_thread(wait_until, lambda: num_executed(target) == 1, "the frame is executed")


async def test_channel_relay_replays_connection(worker: Worker, proxy: Proxy, target: Path) -> None:
    """The relay sends all bytes of a controller again on another connection."""
    controller = await Controller.of(worker, await proxy.relay(worker.address[1]))
    await controller.call(target)
    reader, writer = await asyncio.open_connection(*worker.address)
    writer.write(bytes(proxy.sent))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), LIMIT_S)
    writer.close()
    assert num_executed(target) == 1


async def test_channel_relay_terminates_tls(make_worker: MakeWorker, proxy: Proxy) -> None:
    worker = make_worker("tls")
    port = await proxy.relay(worker.address[1], terminates_tls=True)
    with pytest.raises(ProtocolError, match=f"127.0.0.1:{port} has a different key than this run"):
        await Controller.of(worker, port)
    assert "a process on 127.0.0.1 was refused: it has another token" in worker.end()


async def test_channel_listener_reflects_proof(make_worker: MakeWorker) -> None:
    """A listener without the key sends the HMAC of the connector back."""
    worker = make_worker("plain")

    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING.replace(b" tls  ", b" plain") + bytes(32))
        writer.write((await reader.readexactly(64))[32:])

    async with await asyncio.start_server(reflect, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError, match=f"127.0.0.1:{port} has a different key"):
            await Controller.of(worker, port)


# --- peers that hold connections open -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tls", "plain", "unix"])
async def test_channel_admits_beside_held_connections(make_worker: MakeWorker, mode: str) -> None:
    """No peer waits for a held connection, which would take its whole handshake limit."""
    worker = make_worker(mode)
    for kind in KINDS:
        async with peers_of_kind(kind, worker.address, tls=mode == "tls"):
            for _ in range(NUM_LEGITIMATE):
                async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                    sock = await connect(worker.address, worker.key, LIMIT_S, tls=mode == "tls")
                sock.close()
            together = [
                connect(worker.address, worker.key, LIMIT_S, tls=mode == "tls")
                for _ in range(NUM_LEGITIMATE)
            ]
            for sock in await asyncio.gather(*together):
                sock.close()


async def test_channel_pending_peers_are_bounded(worker: Worker) -> None:
    before = worker.num_threads
    async with peers_of_kind("silent", worker.address, tls=worker.mode == "tls") as peers:
        loop = asyncio.get_running_loop()
        open_peers = set(peers)
        async with asyncio.timeout(LIMIT_S):
            while len(open_peers) > MAX_PENDING_OF_HOST:
                for peer in list(open_peers):
                    with contextlib.suppress(BlockingIOError):
                        if len(peer.recv(100)) == 0:
                            open_peers.discard(peer)
                await asyncio.sleep(0.01)
        assert worker.num_threads == before
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(loop.sock_recv(peers[-1], 100), LIMIT_S):
                pass  # the handshake limit ends the others


@pytest.mark.root
async def test_channel_unix_socket_of_another_user(make_worker: MakeWorker) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: it takes root to become another user")
    worker = make_worker("unix")
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.settimeout(5)\n"
        "try: print(len(s.recv(100)))\n"
        "except ConnectionError: print(0)\n"
    )
    command = [sys.executable, "-I", "-c", script, worker.address[1:]]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"
    (await connect(worker.address, worker.key, LIMIT_S)).close()
    assert "a process on this machine was refused: it belongs to another user" in worker.end()


# --- the log --------------------------------------------------------------------------------------


async def test_channel_refusals_log_is_bounded(worker: Worker) -> None:
    num_refused = 200

    async def be_refused(count: int) -> None:
        for _ in range(count):
            reader, writer = await asyncio.open_connection(*worker.address)
            writer.write(b"\xff" * 300)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), LIMIT_S)
            writer.close()

    await asyncio.gather(*(be_refused(num_refused // 20) for _ in range(20)))
    refused: Any = worker.end().splitlines()
    assert refused[0] == (
        "helmsman: a process on 127.0.0.1 was refused: it did not prove that it belongs to this run"
        if worker.mode == "tls"
        else "helmsman: a process on 127.0.0.1 was refused: it has another token"
    )
    assert f"{num_refused - 1} more connections were refused" in refused[-1]
    assert len(refused) <= 4, "one line per minute"
