r"""Handshake of every connection: mutual HMAC authentication, inside TLS between machines.

    listener                                              connector
    "helmsman plain\n" or "helmsman tls  \n"   ------->
                     [ TLS 1.3, where the greeting says so ]
    nonce                                      ------->
                                               <-------   nonce, HMAC of "connector"
    HMAC of "listener", or zeros to refuse     ------->

Both HMACs cover the two nonces and the fingerprint of the TLS certificate that the end presented or
received. A relay that terminates TLS with its own certificate therefore fails, although connectors
have no prior copy of the listener's certificate. Each HMAC covers the role of its end, so a
connector's HMAC cannot be replayed as a listener's. Each end accepts only its configured mode:
altering the greeting breaks the connection and does not downgrade it. Nothing is decoded before the
handshake is complete.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable

from helmsman._wire.stream import Stream, open_tcp, open_unix
from helmsman._wire.tls import TLS_VARIABLE, ServerTls, client_context, fingerprint_of
from helmsman.api.errors import ProtocolError

HANDSHAKE_LIMIT_S = 5.0
"""Seconds that a peer has to authenticate itself to a listener."""

_MAGIC = b"helmsman"
_PLAIN, _TLS = b" plain\n", b" tls  \n"
_NONCE_BYTES = _MAC_BYTES = 32
_REFUSED = bytes(_MAC_BYTES)


async def authenticate_connector(
    stream: Stream,
    key: bytes,
    tls: ServerTls | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Authenticate a peer that has connected to this listener. The caller limits the time.

    Args:
        stream: The connection; it stays open.
        key: The run's key.
        tls: The listener's TLS; None for a plain connection.
        on_step: Called when the peer completes a step that costs it more than connecting.

    Raises:
        ProtocolError: Its text is a predicate about the peer, such as "has another token".
    """
    try:
        stream.write(_MAGIC + (_TLS if tls else _PLAIN))
        if tls is not None:
            await stream.drain()
            await stream.start_tls(tls.context, server_side=True)
            on_step()
        ours = secrets.token_bytes(_NONCE_BYTES)
        stream.write(ours)
        theirs = await stream.read(_NONCE_BYTES)
        mac = await stream.read(_MAC_BYTES)
        signed = ours + theirs + (tls.fingerprint if tls else b"")
        is_known = hmac.compare_digest(mac, _mac(key, b"connector", signed))
        stream.write(_mac(key, b"listener", signed) if is_known else _REFUSED)
        await stream.drain()
        if not stream.is_open:
            raise ConnectionAbortedError(
                "the peer closed the connection before it received the answer"
            )
    except (EOFError, OSError) as error:
        raise ProtocolError("did not prove that it belongs to this run") from error
    if not is_known:
        raise ProtocolError("has another token")


async def authenticate_listener(
    stream: Stream, key: bytes, *, tls: bool, limit_s: float, where: str
) -> None:
    """Authenticate this end and the listener that it has connected to. Closes the stream on error.

    Args:
        stream: The connection.
        key: The run's key.
        tls: Whether the connection must use TLS.
        limit_s: Time limit in seconds.
        where: Address of the listener, for messages.

    Raises:
        ProtocolError: The listener is not of this run. The cause is a TimeoutError, EOFError or
            ConnectionError where it was silent or closed the connection.
    """
    try:
        async with asyncio.timeout(limit_s):
            await _authenticate_listener(stream, key, tls, where)
    except BaseException as error:
        stream.close()
        if not isinstance(error, EOFError | OSError):
            raise
        raise ProtocolError(
            f"the process at the other end of {where} did not prove that it belongs to this run"
        ) from error


async def _authenticate_listener(stream: Stream, key: bytes, tls: bool, where: str) -> None:
    mode = b""
    if await stream.read(len(_MAGIC)) == _MAGIC:
        # Read in two parts: another program's greeting may be shorter than ours.
        mode = await stream.read(len(_TLS))
    if mode not in (_PLAIN, _TLS):
        raise ProtocolError(
            f"the process at the other end of {where} did not prove that it belongs to this run"
        )
    if (mode == _TLS) != tls:
        there, here = ("uses TLS", "does not") if mode == _TLS else ("does not use TLS", "does")
        raise ProtocolError(
            f"the process at the other end of {where} {there}, and this one {here}. Set "
            f"{TLS_VARIABLE} to the same value for "
            "both: 1, or 0 on a trusted network"
        )
    fingerprint = b""
    if tls:
        await stream.start_tls(client_context(), server_side=False)
        assert isinstance(stream.socket, ssl.SSLSocket)
        fingerprint = fingerprint_of(stream.socket.getpeercert(binary_form=True))
    theirs = await stream.read(_NONCE_BYTES)
    ours = secrets.token_bytes(_NONCE_BYTES)
    signed = theirs + ours + fingerprint
    stream.write(ours + _mac(key, b"connector", signed))
    answer = await stream.read(_MAC_BYTES)
    if not hmac.compare_digest(answer, _mac(key, b"listener", signed)):
        raise ProtocolError(
            f"the process at the other end of {where} has a different key than this run"
        )


def _mac(key: bytes, role: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, role + signed, "sha256")


async def connect(
    address: str | tuple[str, int], key: bytes, limit_s: float, *, tls: bool = False
) -> socket.socket:
    """Connect to a listener of this run and authenticate both ends.

    Args:
        address: Path of a Unix socket, or numeric address and port.
        key: The run's key.
        limit_s: Time limit in seconds, for connecting and for authenticating each.
        tls: Whether the connection must use TLS.

    Returns:
        The socket, non-blocking; an ssl.SSLSocket with TLS.

    Raises:
        OSError: Connecting failed.
        ProtocolError: The listener is not a process of this run.
    """
    if isinstance(address, str):
        stream, where = await open_unix(address, limit_s), address.replace("\0", "@")
    else:
        stream, where = await open_tcp(address, limit_s), f"{address[0]}:{address[1]}"
    await authenticate_listener(stream, key, tls=tls, limit_s=limit_s, where=where)
    return stream.detach()
