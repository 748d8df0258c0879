"""Tests that peers without the token neither use nor block the control port of ``helmsman up``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from helmsman._cluster.connection import (
    Ended,
    Hello,
    LinkTimeouts,
    PeerConnection,
    PeerLostError,
    Welcome,
    connect,
    proof_key,
)
from helmsman._wire.auth import HANDSHAKE_LIMIT_S
from helmsman.api.errors import ProtocolError
from tests.cluster.nodes import VERSIONS, MakeNodes, Node, script
from tests.contract.helpers import LIMIT_S
from tests.hostile.peers import KINDS, NUM_LEGITIMATE, peers_of_kind
from tests.hostile.proxy import Proxy

TIMEOUTS = LinkTimeouts(connect_s=LIMIT_S)


@pytest.fixture
async def head(make_nodes: MakeNodes) -> AsyncIterator[Node]:
    """The supervisor of rank 0 while it waits for its members."""
    nodes = make_nodes(NUM_LEGITIMATE + 1, command=script("pass"), timeouts=LinkTimeouts())
    started = nodes.start(0)
    await asyncio.to_thread(started.said, "not connected")
    yield started
    started.process.kill()


async def connected(head: Node, port: int | None = None) -> PeerConnection:
    """Return an authenticated link of a member."""
    key = proof_key(head.plan.secret, head.plan.job)
    return await connect("127.0.0.1", port or head.plan.control_port, key, TIMEOUTS, tls=True)


async def join(head: Node, rank: int, port: int | None = None) -> PeerConnection:
    """Return a link of a member that the head has accepted."""
    link = await connected(head, port)
    link.send(
        Hello(
            rank=rank,
            count=head.plan.identity.count,
            hostname=f"node-{rank}",
            address="127.0.0.1",
            versions=VERSIONS,
            num_devices=0,
            device_kind="GPU",
        )
    )
    assert isinstance(await link.receive(), Welcome)
    return link


async def receive_end(link: PeerConnection) -> None:
    """Return when the head reports the end of the run."""
    while not isinstance(await link.receive(), Ended):
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_control_port_admits_beside_held_connections(head: Node, kind: str) -> None:
    """No member waits for a held connection, which would take its whole handshake limit."""
    links = []
    async with peers_of_kind(kind, ("127.0.0.1", head.plan.control_port), tls=True):
        for rank in range(1, NUM_LEGITIMATE + 1):
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                links.append(await join(head, rank))
    for link in links:
        await link.close()
    evicted = "had not proved that it belongs to this run when newer connections evicted it"
    assert len(head.lines(evicted)) <= 2


async def test_control_port_relay_injects_end(head: Node, proxy: Proxy) -> None:
    """A relay reports the end of the run in the name of the head."""
    link = await join(head, 1, await proxy.relay(head.plan.control_port))
    message = msgspec.msgpack.encode(Ended("by the relay"))
    proxy.inject_back(len(message).to_bytes(4, "big") + message)
    with pytest.raises(PeerLostError, match="the connection was closed"):
        await receive_end(link)
    await link.close()
    await asyncio.to_thread(head.said, "127.0.0.1), connection lost")
    await (await join(head, 1)).close()


async def test_control_port_relay_terminates_tls(head: Node, proxy: Proxy) -> None:
    port = await proxy.relay(head.plan.control_port, terminates_tls=True)
    with pytest.raises(ProtocolError, match=f"127.0.0.1:{port} has a different key than this run"):
        await connected(head, port)
    head.said("a process on 127.0.0.1 was refused: it has another token")


async def test_control_port_switch_differs(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=script("pass"))
    head = nodes.start(0, tls=False)
    member = nodes.start(1)
    member.ends(
        92,
        f"127.0.0.1:{nodes.port} does not use TLS, and this one does. Set HELMSMAN_TLS to the "
        "same value",
    )
    nodes.start(1, tls=False).ends(0)
    head.ends(0)
