"""Store in which the ranks of a group meet; it serves only processes that have the group's key.

torch's own TCPStore serves any process that reaches its port. Here connections are those of _base:
authenticated by HMAC on both ends, and in TLS between machines.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from helmsman._process.descriptors import mark_background
from helmsman._wire.auth import connect
from helmsman._wire.door import BACKLOG, Door
from helmsman._wire.group_keys import needs_tls
from helmsman._wire.stream import WOULD_BLOCK, Stream
from helmsman._wire.tls import server_tls
from helmsman.api.errors import ProtocolError
from helmsman.api.refusals import RefusalLog

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
_FIRST_RETRY_S, _MAX_RETRY_S = 0.002, 0.2
_MEMBER = "helmsman/rank {}"
"""Key that a rank sets when it joins."""
_GRACE_S = 5.0
"""Time for an answer after the limit of a request has passed at the server."""


class _Request(msgspec.Struct, array_like=True):
    verb: str
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0
    limit_s: float = 0.0
    """Longest wait for the keys."""


class _Answer(msgspec.Struct, array_like=True):
    value: bytes | int | None = None
    is_late: bool = False
    """Whether the limit passed before all keys were set."""


_encode = msgspec.msgpack.encode
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class StoreServer:
    """Holds the keys of a group, and serves them on a thread until it is closed.

    Args:
        listener: Listening socket, which close() closes.
        key: The group's key.

    Raises:
        BackendNotInstalledError: The key requires TLS, and the package cryptography is missing.
    """

    def __init__(self, listener: socket.socket, key: str) -> None:
        self._values: dict[str, bytes] = {}
        self._arrivals: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)
        """For keys that a request waits for."""
        self._streams: set[Stream] = set()
        self._tls = server_tls() if needs_tls(key) else None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, key.encode()), name="helmsman-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        with contextlib.suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, listener: socket.socket, key: bytes) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._accept(listener, key))

    async def _accept(self, listener: socket.socket, key: bytes) -> None:
        door = Door(
            listener, key, tls=self._tls, admit=self._admit, refusals=RefusalLog(log.warning)
        )
        try:
            await self._closing.wait()
        finally:
            door.close()
            for stream in list(self._streams):
                self._leave(stream)

    def _admit(self, stream: Stream, host: str) -> None:
        self._streams.add(stream)
        # Without a task for each connection, a request costs half as much: gloo sends two for
        # each pair of ranks.
        asyncio.get_running_loop().add_reader(stream.socket, self._read, stream, bytearray())

    def _leave(self, stream: Stream) -> None:
        self._streams.discard(stream)
        stream.close()

    def _read(self, stream: Stream, data: bytearray) -> None:
        try:
            while part := stream.socket.recv(_READ_BYTES):
                data += part
            is_open = False
        except WOULD_BLOCK:
            is_open = True
        except OSError:
            is_open = False
        if not is_open:
            self._leave(stream)
            return
        while len(data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
            if len(data) < end:
                return
            request = _decode_request(data[_LENGTH.size : end])
            del data[:end]
            try:
                self._answer(stream, request)
            except (LookupError, ValueError) as error:  # such as "add" to a text
                log.warning("a request to the store of a group failed: %r", error)
                self._leave(stream)
                return

    def _answer(self, stream: Stream, request: _Request) -> None:
        if request.verb == "wait" and not all(key in self._values for key in request.keys):
            asyncio.get_running_loop().create_task(self._wait(stream, request))
        else:
            stream.write(_framed(self._result(request)))

    async def _wait(self, stream: Stream, request: _Request) -> None:
        try:
            async with asyncio.timeout(request.limit_s):
                for key in request.keys:
                    while key not in self._values:
                        await self._arrivals[key].wait()
            answer = _Answer(self._values.get(request.keys[-1], b""))
        except TimeoutError:
            answer = _Answer(is_late=True)
        stream.write(_framed(answer))

    def _result(self, request: _Request) -> _Answer:
        values, keys = self._values, request.keys
        match request.verb:
            case "wait":
                return _Answer(values[keys[-1]] if keys else b"")
            case "set":
                self._set(keys[0], request.values[0])
            case "add":
                total = int(values.get(keys[0], b"0")) + request.amount
                self._set(keys[0], b"%d" % total)
                return _Answer(total)
            case "compare_set":
                expected, desired = request.values
                if values.get(keys[0], b"") == expected:
                    self._set(keys[0], desired)
                return _Answer(values.get(keys[0], expected))
            case "check":
                return _Answer(int(all(key in values for key in keys)))
            case "delete":
                return _Answer(int(values.pop(keys[0], None) is not None))
        return _Answer()

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.set()


def _framed(message: _Request | _Answer) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class GroupStore(dist.Store):
    """A client of a StoreServer, for torch's process groups; any thread may use it.

    torch refers to it from C++ only, so its creator must keep it while a group uses it.

    Args:
        address: Address of the server.
        port: Port of the server.
        key: The group's key.
        timeout_s: Limit in seconds for connecting, and for keys to be set.
        server: The server, if it is in this process; close() closes it, as does an error here.

    Raises:
        DistNetworkError: No server of this group answered in time.
    """

    timeout: timedelta
    """Limit of a wait for keys, which ``set_timeout`` of torch's class changes."""

    def __init__(
        self, address: str, port: int, key: str, timeout_s: float, server: StoreServer | None = None
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._address, self._port, self._key = address, port, key
        self._server = server
        self._is_closed = False
        self._idle: list[socket.socket] = []
        """Connections without a request in progress."""
        try:
            self._idle.append(self._connect(timeout_s))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; later requests fail at once. Idempotent."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()
        if self._server is not None:
            self._server.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_Request("set", [key], [_bytes(value)]))

    def get(self, key: str) -> bytes:
        value = self._wait([key], self.timeout)
        assert isinstance(value, bytes)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_Request("add", [key], amount=amount)).value or 0)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(_Request("check", keys)).value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self.timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = _Request("compare_set", [key], [_bytes(expected), _bytes(desired)])
        value = self._ask(request).value
        assert isinstance(value, bytes)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(_Request("delete", [key])).value)

    def clone(self) -> GroupStore:
        return self

    def _wait(self, keys: list[str], timeout: timedelta) -> Any:
        limit_s = timeout.total_seconds()
        answer = self._ask(_Request("wait", keys, limit_s=limit_s))
        if answer.is_late:
            raise dist.DistStoreError(
                f"{', '.join(keys[:4])} was not set within {limit_s:g} s in the group's store at "
                f"{self._address}:{self._port}"
            )
        return answer.value

    def _ask(self, request: _Request) -> _Answer:
        if self._is_closed:
            raise dist.DistNetworkError("this process has left the group")
        try:
            link = self._idle.pop()
        except IndexError:  # each one waits for an answer
            link = self._connect(0.0)
        try:
            link.settimeout(request.limit_s + _GRACE_S)
            link.sendall(_framed(request))
            (size,) = _LENGTH.unpack(_received(link, _LENGTH.size))
            answer = _decode_answer(_received(link, size))
        except (EOFError, OSError) as error:
            link.close()
            raise dist.DistNetworkError(
                f"the group's store at {self._address}:{self._port} did not answer "
                f"({str(error) or 'it has closed the connection'}): the process of rank 0 has "
                "ended, has left the group or does not respond"
            ) from error
        except BaseException:
            link.close()  # an interrupt: the answer may arrive later
            raise
        self._idle.append(link)
        return answer

    def _connect(self, patience_s: float) -> socket.socket:
        """Connect to the server, which may begin to listen within ``patience_s``."""
        # A thread of its own, because this one may run an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._connected(patience_s)).result()

    async def _connected(self, patience_s: float) -> socket.socket:
        deadline, pause_s = time.monotonic() + patience_s, _FIRST_RETRY_S
        while True:
            limit_s = max(_GRACE_S, deadline - time.monotonic())
            try:
                address = _resolved(self._address, self._port)[1]
                link = await connect(address, self._key.encode(), limit_s, tls=needs_tls(self._key))
                mark_background(link)  # a monitor of NCCL asks the store every second
                return link
            except (OSError, ProtocolError) as error:
                if time.monotonic() + pause_s > deadline:
                    raise dist.DistNetworkError(
                        f"no store of this group at {self._address}:{self._port}: {error}"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)


def _received(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def meet(
    address: str, port: int, key: str, *, rank: int, world_size: int, timeout_s: float
) -> GroupStore:
    """Open the store of a group, served by its rank 0, and wait until all ranks have done so.

    Raises:
        TimeoutError: Some ranks did not come in time.
        DistNetworkError: Rank 0 did not answer, or another process has joined as this rank.
        OSError: Rank 0 cannot listen there.
    """
    deadline = time.monotonic() + timeout_s
    server = StoreServer(listen(address, port), key) if rank == 0 else None
    own, members = os.urandom(16), [_MEMBER.format(each) for each in range(world_size)]
    while True:
        store = GroupStore(address, port, key, max(0.0, deadline - time.monotonic()), server)
        try:
            if store.compare_set(members[rank], "", own) != own:
                raise dist.DistNetworkError(f"rank {rank} is in the group's store already")
            _wait_for(members, store, deadline)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        except BaseException as error:
            store.close()
            # A rank may rejoin before rank 0 has closed the store of the last group.
            is_ended = server is None and isinstance(error, dist.DistNetworkError)
            if not is_ended or time.monotonic() + _MAX_RETRY_S > deadline:
                raise
            time.sleep(_MAX_RETRY_S)


def _wait_for(members: list[str], store: GroupStore, deadline: float) -> None:
    try:
        store.wait(members, timedelta(seconds=max(0.0, deadline - time.monotonic())))
    except dist.DistStoreError as error:
        missing = [str(rank) for rank, each in enumerate(members) if not store.check([each])]
        raise TimeoutError(
            f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not join."
        ) from error


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen for the ranks of a group.

    Args:
        address: Address or name of this host.
        port: The port; 0 for any.

    Raises:
        OSError: The port is in use, or the address is not of this host.
    """
    family, place = _resolved(address, port)
    return socket.create_server(place, family=family, backlog=BACKLOG)


def _resolved(address: str, port: int) -> tuple[int, Any]:
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, place
