"""Authenticated, framed connections between the head's supervisor and those of the other nodes,
with a heartbeat each second.

They carry facts that Ray does not have: the end of a run and its exit code, the reason why a node
leaves. Nothing is decoded before the peer has authenticated itself by the run's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
from collections.abc import Mapping

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.api.forms import run_in_new_thread
from helmsman.rpc_server._wire.auth import authenticate_listener
from helmsman.rpc_server._wire.stream import Stream, open_tcp
from helmsman.rpc_server._wire.wire import LENGTH_BYTES, pack_length, unpack_length

_MOST_BYTES = 1 << 20


class LinkTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long supervisors wait for each other, in seconds."""

    connect_s: float = 2.0
    """For a head to answer, and as long again for the authentication."""
    heartbeat_s: float = 1.0
    """Between two heartbeats."""
    silent_s: float = 12.0
    """A peer that sends nothing for so long cannot be reached."""
    refused_s: float = 1.0
    """A host that refuses connections for so long has no head any more."""
    unreachable_s: float = 6.0
    """How long a node tries to reach a head that has fallen silent."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message between supervisors."""


class Hello(Message, frozen=True, kw_only=True):
    rank: int
    count: int
    hostname: str
    address: str
    process: str
    """The id of its part of the run, which distinguishes a reconnected node from another one of the
    same rank.
    """
    versions: Mapping[str, str]
    num_devices: int
    device_kind: str
    run_id: str = ""
    """Of the run that it belonged to before the connection was lost."""
    has_joined: bool = False
    """Its Ray was up before the connection was lost."""


class Refused(Message, frozen=True):
    reason: str
    ended: bool = False
    """The node belonged to an earlier run on this port, which has ended."""


class Welcome(Message, frozen=True, kw_only=True):
    """The head takes the node, and its Ray is up."""

    run_id: str
    address: str
    """Of the head's Ray."""
    variables: Mapping[str, str]
    """Ray's, which are the same everywhere."""
    token: str = ""
    """Of the Ray cluster, where the user has given no secret from which both derive it."""


class Joined(Message, frozen=True):
    """The node's Ray is up."""


class Waiting(Message, frozen=True):
    """The nodes that are still missing, for people."""

    text: str


class Heartbeat(Message, frozen=True):
    """Sent each second."""


class Ended(Message, frozen=True):
    """The run has ended: leave."""

    reason: str
    failed: bool = False
    """It never began."""


class Leaving(Message, frozen=True):
    reason: str
    signal: int = 0
    """That told it to."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Hello | Refused | Welcome | Joined | Waiting | Heartbeat | Ended | Leaving
)


class PeerLostError(Exception):
    """The peer has closed the connection, or has fallen silent."""


class PeerConnection:
    """One connection, for one reader."""

    def __init__(self, stream: Stream, timeouts: LinkTimeouts) -> None:
        self._stream, self._timeouts = stream, timeouts
        self._length: int | None = None
        """Of the message whose beginning was read when a reader was cancelled."""
        self._heartbeats = asyncio.ensure_future(self._send_heartbeats())
        self._heard = asyncio.Event()

    def send(self, message: Message) -> None:
        """Send without waiting; a peer that is lost meanwhile does not get it."""
        data = _encoder.encode(message)
        self._stream.write(pack_length(len(data)) + data)

    async def receive(self) -> Message:
        """The next message other than a heartbeat; a cancelled call loses none. Raises:
        PeerLostError.
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
                message: Message = _decoder.decode(data)
            except TimeoutError as error:
                raise PeerLostError(
                    f"nothing was heard for {self._timeouts.silent_s:g} s"
                ) from error
            except (EOFError, OSError) as error:
                raise PeerLostError("the connection was closed") from error
            except ProtocolError as error:
                raise PeerLostError(str(error)) from error
            except msgspec.MsgspecError as error:
                raise PeerLostError(f"a message of another version of Helmsman: {error}") from error
            self._heard.set()
            if not isinstance(message, Heartbeat):
                return message

    async def is_heard(self) -> bool:
        """Whether the peer sends anything in the time of two heartbeats, while another task
        receives.
        """
        self._heard.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), 2.0 * self._timeouts.heartbeat_s)
        return self._heard.is_set()

    async def _send_heartbeats(self) -> None:
        while self._stream.is_open:
            self.send(Heartbeat())
            await self._stream.drain()
            await asyncio.sleep(self._timeouts.heartbeat_s)

    async def close(self) -> None:
        """Send what is to be sent, within a second, and close."""
        self._heartbeats.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stream.drain(), 1.0)
        self._stream.close()


def proof_key(secret: str, run: str) -> bytes:
    """Key of the mutual authentication. Without a secret it only keeps different jobs apart."""
    return hmac.new(secret.encode(), f"helmsman up {run}".encode(), hashlib.sha256).digest()


async def connect(
    host: str, port: int, key: bytes, timeouts: LinkTimeouts, *, tls: bool
) -> PeerConnection:
    """Connect to a head, by the key of proof_key; ``tls`` must be the same there. Raises: OSError
    (no process listens), PeerLostError (the head accepts, and then is silent or closes, as when it
    is overloaded or ends), ProtocolError (it is not the head of this run).
    """
    stream = await _open(host, port, timeouts.connect_s)
    try:
        await authenticate_listener(
            stream, key, tls=tls, limit_s=timeouts.connect_s, where=f"{host}:{port}"
        )
    except ProtocolError as error:
        if isinstance(error.__cause__, TimeoutError):
            raise PeerLostError(
                f"connected, and then nothing was heard for {timeouts.connect_s:g} s"
            ) from error
        if isinstance(error.__cause__, (EOFError, ConnectionError)):
            raise PeerLostError("it closed the connection") from error
        raise
    return PeerConnection(stream, timeouts)


async def _open(host: str, port: int, limit_s: float) -> Stream:
    """A connection to the first address of this host that answers. Raises: OSError."""
    try:
        # Where the name server does not answer, it takes half a minute until the host's name is
        # known to be unknown.
        found = await run_in_new_thread(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host") from error
    failure: OSError | None = None
    for *_, address in found:
        try:
            return await open_tcp(address, limit_s)
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host!r} has no address")
