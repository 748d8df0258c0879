"""Authenticated, framed connections between supervisors, with a heartbeat each second.

They carry facts that Ray does not have: the end of a run with its exit code, and the reason why a
node leaves. Nothing is decoded before the peer has authenticated with the run's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import time
from collections.abc import Mapping

import msgspec

from helmsman._wire.auth import authenticate_listener
from helmsman._wire.stream import Stream, open_tcp
from helmsman._wire.wire import LENGTH_BYTES, pack_length, unpack_length
from helmsman.api.errors import ProtocolError
from helmsman.api.forms import run_in_new_thread

_MOST_BYTES = 1 << 20


class LinkTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of connections between supervisors, in seconds."""

    connect_s: float = 2.0
    """Time for a head to accept, and the same again for authentication."""
    heartbeat_s: float = 1.0
    """Interval between heartbeats."""
    silent_s: float = 15.0
    """A peer that is silent for longer is lost."""


class SupervisorMessage(msgspec.Struct, frozen=True, tag=True):
    """A message between supervisors."""


class Hello(SupervisorMessage, frozen=True, kw_only=True):
    rank: int
    count: int
    hostname: str
    address: str
    versions: Mapping[str, str]
    num_devices: int
    device_kind: str


class Refused(SupervisorMessage, frozen=True):
    reason: str


class Welcome(SupervisorMessage, frozen=True, kw_only=True):
    """The head accepts the node, and the head's Ray is up."""

    run_id: str
    address: str
    """Address of the head's Ray."""
    variables: Mapping[str, str]
    """Variables of Ray, the same on all nodes."""
    token: str = ""
    """Token of the Ray cluster; '' if both sides derive it from the user's secret."""


class Joined(SupervisorMessage, frozen=True):
    """The node's Ray is up."""


class Waiting(SupervisorMessage, frozen=True):
    """The nodes that are still missing, as text for users; '' once all have joined."""

    text: str


class Heartbeat(SupervisorMessage, frozen=True):
    """Sent each second."""


class Ended(SupervisorMessage, frozen=True):
    """The run has ended, and the node must leave."""

    reason: str
    failed: bool = False
    """Whether the run never started."""


class Leaving(SupervisorMessage, frozen=True):
    reason: str
    signal: int = 0
    """Number of the signal that the node received; 0 without one."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Hello | Refused | Welcome | Joined | Waiting | Heartbeat | Ended | Leaving
)


class PeerLostError(Exception):
    """The peer has closed the connection or is silent."""


class PeerConnection:
    """A connection to a peer, for a single reader."""

    def __init__(self, stream: Stream, timeouts: LinkTimeouts) -> None:
        self._stream, self._timeouts = stream, timeouts
        self._length: int | None = None
        """Length of a message whose header was read when a reader was cancelled."""
        self._heartbeats = asyncio.ensure_future(self._send_heartbeats())
        self._heard_at = time.monotonic()

    def send(self, message: SupervisorMessage) -> None:
        """Send without waiting; the message is lost if the connection breaks."""
        data = _encoder.encode(message)
        self._stream.write(pack_length(len(data)) + data)

    async def receive(self) -> SupervisorMessage:
        """Return the next message other than a heartbeat; cancellation loses no message.

        Raises:
            PeerLostError: The connection is closed, silent or invalid.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeouts.silent_s):
                    if self._length is None:
                        self._length = unpack_length(
                            await self._stream.read(LENGTH_BYTES), _MOST_BYTES
                        )
                    data = await self._stream.read(self._length)
                self._length = None
                message: SupervisorMessage = _decoder.decode(data)
            except TimeoutError as error:
                raise PeerLostError(
                    f"no data was received for {self._timeouts.silent_s:g} s"
                ) from error
            except (EOFError, OSError) as error:
                raise PeerLostError("the connection was closed") from error
            except ProtocolError as error:
                raise PeerLostError(str(error)) from error
            except msgspec.MsgspecError as error:
                raise PeerLostError(f"a message of another version of Helmsman: {error}") from error
            self._heard_at = time.monotonic()
            if not isinstance(message, Heartbeat):
                return message

    @property
    def is_silent(self) -> bool:
        """Whether the peer has sent nothing for two heartbeats, as received until now."""
        return time.monotonic() - self._heard_at > 2.0 * self._timeouts.heartbeat_s

    async def _send_heartbeats(self) -> None:
        while self._stream.is_open:
            self.send(Heartbeat())
            await self._stream.drain()
            await asyncio.sleep(self._timeouts.heartbeat_s)

    async def close(self) -> None:
        """Flush for at most one second, and close."""
        self._heartbeats.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stream.drain(), 1.0)
        self._stream.close()


def proof_key(secret: str, run: str) -> bytes:
    """Return the key for mutual authentication; without a secret it only separates jobs."""
    return hmac.new(secret.encode(), f"helmsman up {run}".encode(), hashlib.sha256).digest()


async def connect(
    host: str, port: int, key: bytes, timeouts: LinkTimeouts, *, tls: bool
) -> PeerConnection:
    """Connect to a head with the key of proof_key; ``tls`` must be equal on both sides.

    Raises:
        OSError: No process listens.
        PeerLostError: The head accepts and then is silent or closes; it is overloaded or ending.
        ProtocolError: The listener is not the head of this run.
    """
    stream = await _open(host, port, timeouts.connect_s)
    try:
        await authenticate_listener(
            stream, key, tls=tls, limit_s=timeouts.connect_s, where=f"{host}:{port}"
        )
    except ProtocolError as error:
        if isinstance(error.__cause__, (TimeoutError, EOFError, ConnectionError)):
            raise PeerLostError("it accepts a connection, and is silent or closes it") from error
        raise
    return PeerConnection(stream, timeouts)


async def _open(host: str, port: int, limit_s: float) -> Stream:
    """Connect to the first address of a host that accepts. Raises OSError."""
    try:
        # In a thread: without a name server, the lookup of an unknown host takes half a minute.
        found = await run_in_new_thread(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a valid host name") from error
    failure: OSError | None = None
    for *_, address in found:
        try:
            return await open_tcp(address, limit_s)
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host!r} has no address")
