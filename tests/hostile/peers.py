"""Silent, slow and stalled peers without the key, which hold connections open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from helmsman._wire.stream import Stream
from helmsman._wire.tls import client_context
from tests.hostile.proxy import GREETING

NUM_PEERS = 200
NUM_LEGITIMATE = 20
KINDS = ["silent", "slow", "stalled"]


@contextlib.asynccontextmanager
async def peers_of_kind(
    kind: str, address: Any, *, tls: bool, count: int = NUM_PEERS
) -> AsyncIterator[list[socket.socket]]:
    """Connect peers, which keep their connections as long as the listener does.

    Args:
        kind: "silent" sends nothing; "slow" sends a byte at a time; "stalled" completes a TLS
            handshake, and sends half of the rest.
        address: Address of the listener.
        tls: Whether the listener uses TLS.
        count: Number of peers.
    """
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    for _ in range(count):
        peer = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        peer.setblocking(False)
        await loop.sock_connect(peer, address if isinstance(address, str) else tuple(address))
        sockets.append(peer)
    acting = [asyncio.ensure_future(_act(kind, peer, tls)) for peer in sockets]
    if kind == "stalled":
        await asyncio.wait(acting, timeout=30.0)
    try:
        yield sockets
    finally:
        for task in acting:
            task.cancel()
        await asyncio.wait(acting)
        for peer in sockets:
            peer.close()


async def _act(kind: str, peer: socket.socket, tls: bool) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, EOFError):
        if kind == "slow":
            for byte in b"\x16\x03\x01\x02\x00\x01" + bytes(1000):  # begins like TLS
                await loop.sock_sendall(peer, bytes([byte]))
                await asyncio.sleep(0.1)
        elif kind == "stalled":
            stream = Stream(peer)
            await stream.read(len(GREETING))
            if tls:
                await stream.start_tls(client_context(), server_side=False)
            stream.write(bytes(40))
            await stream.drain()
