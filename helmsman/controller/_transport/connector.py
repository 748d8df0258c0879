"""Connector: opens the connections of one session, the first and those after a loss."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable

from helmsman._base.stream import Stream
from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.wire import HELLO, LENGTH_BYTES, WELCOME, pack_length, unpack_length

_GREET_S = 5.0

Connect = Callable[[], Awaitable[socket.socket]]
"""Opens an authenticated connection, plain or TLS. Raises OSError or ProtocolError."""


class Connector:
    """Connects to a worker and exchanges the first messages, which name the session.

    Attempts are numbered, so that the worker refuses one that arrives after a later one.
    """

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.token = secrets.token_bytes(16)
        """Identifies the session."""
        self._num_attempts = 0

    async def open(self, num_received: int) -> tuple[socket.socket, int]:
        """Connect; returns the socket and the number of messages that the worker has received.

        ``num_received`` is the number that this end has received. Raises OSError or ProtocolError.
        """
        hello = HELLO.pack(self.token, self._num_attempts, num_received)
        self._num_attempts += 1
        stream = Stream(await self.connect())
        try:
            async with asyncio.timeout(_GREET_S):
                stream.write(pack_length(HELLO.size) + hello)
                welcome = await stream.read(unpack_length(await stream.read(LENGTH_BYTES)))
            if len(welcome) != WELCOME.size:
                raise ProtocolError(
                    f"the worker's first message has {len(welcome)} bytes, expected {WELCOME.size}"
                )
        except EOFError as error:
            stream.close()
            raise ConnectionResetError("the worker closed the connection immediately") from error
        except BaseException:
            stream.close()
            raise
        return stream.detach(), WELCOME.unpack(welcome)[0]
