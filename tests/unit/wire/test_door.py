"""Test the reports of refused connections; tests/hostile attacks the server itself."""

from __future__ import annotations

import asyncio
import hmac
import socket

import pytest

from helmsman._wire.auth import authenticate_connector
from helmsman._wire.stream import Stream
from helmsman.api.errors import ProtocolError
from helmsman.api.refusals import RefusalLog

TOKEN = "was refused: it has another token"
PROOF = "was refused: it did not prove that it belongs to this run"


async def test_refusal_log_counts_after_first() -> None:
    lines: list[str] = []
    log = RefusalLog(lines.append, interval_s=3600.0)
    log.note(TOKEN, "10.0.0.1")
    for number in range(1000):
        log.note(PROOF, f"10.0.1.{number % 256}")
    log.note(TOKEN, "10.0.0.2")
    assert lines == [f"a process on 10.0.0.1 {TOKEN}"]
    log.close()
    log.close()
    assert lines[1:] == [
        (
            "1001 more connections were refused in 3600 s at most, the latest from 10.0.0.2: "
            f"1000 x '{PROOF}'; 1 x '{TOKEN}'"
        )
    ]


async def test_refusal_log_interval() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    log = RefusalLog(lines.put_nowait, interval_s=0.01)
    log.note(TOKEN, "10.0.0.1")
    log.note(TOKEN, "10.0.0.2")
    assert await lines.get() == f"a process on 10.0.0.1 {TOKEN}"
    assert await asyncio.wait_for(lines.get(), 30.0) == (
        "1 more connections were refused in 0.01 s at most, the latest from 10.0.0.2: 1 x "
        f"'{TOKEN}'"
    )
    log.close()


async def test_refusal_log_after_quiet_interval() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    log = RefusalLog(lines.put_nowait, interval_s=0.0)
    for host in ("10.0.0.1", "10.0.0.2"):
        log.note(TOKEN, host)
        assert await asyncio.wait_for(lines.get(), 30.0) == f"a process on {host} {TOKEN}"
        for _ in range(3):  # iterations of the loop, in which the interval ends
            await asyncio.sleep(0)
    log.close()


async def test_authenticate_connector_closed_early() -> None:
    ours, theirs = socket.socketpair()
    listening = asyncio.ensure_future(authenticate_connector(Stream(ours), b"key"))
    peer = Stream(theirs)
    nonce = (await peer.read(len(b"helmsman plain\n") + 32))[-32:]
    peer.write(bytes(32) + hmac.digest(b"key", b"connector" + nonce + bytes(32), "sha256"))
    peer.close()
    with pytest.raises(ProtocolError, match="did not prove that it belongs to this run"):
        await listening
