"""A man in the middle without the key: it relays, alters and injects bytes, or terminates TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from helmsman._wire.tls import client_context, server_tls

GREETING = b"helmsman tls  \n"


class Proxy:
    """Relays connections to a port of this machine. The test acts on the latest connection once it
    is authenticated.
    """

    def __init__(self) -> None:
        self.sent = bytearray()
        """Bytes from the connector to the listener."""
        self.alter = False
        """Whether a bit of each further chunk to the listener is flipped."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._to_listener: asyncio.StreamWriter | None = None
        self._to_connector: asyncio.StreamWriter | None = None

    async def relay(self, port: int, *, terminates_tls: bool = False) -> int:
        """Listen for connectors and relay them to ``port``; returns the proxy's own port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            if terminates_tls:
                context = server_tls().context
                greeting = await far_reader.readexactly(len(GREETING))
                await far_writer.start_tls(client_context())
                writer.write(greeting)
                await writer.start_tls(context)
            self._to_listener, self._to_connector = far_writer, writer
            for source, sink, is_forth in ((reader, far_writer, True), (far_reader, writer, False)):
                task = asyncio.ensure_future(self._carry(source, sink, is_forth))
                self._tasks.add(task)

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        own_port: int = self._server.sockets[0].getsockname()[1]
        return own_port

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_forth: bool
    ) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await source.read(1 << 16):
                if asyncio.current_task() in self._silent:
                    continue
                if is_forth:
                    self.sent += data
                    if self.alter:
                        data = data[:-1] + bytes([data[-1] ^ 1])
                sink.write(data)
        sink.close()

    def inject(self, data: bytes) -> None:
        """Send the proxy's own bytes to the listener."""
        assert self._to_listener is not None
        self._to_listener.write(data)

    def inject_back(self, data: bytes) -> None:
        """Send the proxy's own bytes to the connector."""
        assert self._to_connector is not None
        self._to_connector.write(data)

    def silence(self) -> None:
        """Drop all further bytes of the present connections, which stay open."""
        self._silent = set(self._tasks)

    def drop(self) -> None:
        """Abort the latest connection at both ends."""
        for writer in (self._to_listener, self._to_connector):
            assert writer is not None
            writer.transport.abort()

    def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        for writer in (self._to_listener, self._to_connector):
            if writer is not None:
                writer.transport.abort()
        if self._server is not None:
            self._server.close()
