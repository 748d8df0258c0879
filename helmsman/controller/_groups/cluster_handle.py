"""Calls of a Cluster from other processes: ClusterHandle there, ClusterDesk beside the Cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import operator
import os
import secrets
import socket
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from helmsman._base.event_loop import forbid_blocking, run_sync, submit
from helmsman._process.ports import port_range
from helmsman._wire.auth import connect
from helmsman._wire.codec import Packed, Payload, decode, encode, encode_arguments
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.tls import server_tls, uses_tls
from helmsman._wire.wire import Outgoing
from helmsman.api.closing import Closing
from helmsman.api.dispatch import MethodSpec, Unregistered
from helmsman.api.errors import DispatchError, HelmsmanError, ProtocolError
from helmsman.api.topology import Topology
from helmsman.api.worker_group import GroupFuture, GroupMethod, Options, WorkerGroup
from helmsman.controller._groups.calls import CallSurface, RankFutures
from helmsman.controller._scheduler.argument_types import require_seconds
from helmsman.controller._scheduler.transport.base import Ending, error_in
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.rpc_server._host.host import ReplyFn
from helmsman.rpc_server._server.channel import ChannelServer, listen_abstract, listen_tcp

W_co = TypeVar("W_co", covariant=True)

_CONNECT_S = 10.0
_ANSWER_THREADS = 4


class DeskAddress(msgspec.Struct, frozen=True):
    """Address at which a desk listens, and the key of its connections."""

    where: str | tuple[str, int]
    key: bytes
    tls: bool
    shares_memory: bool
    """Whether only processes of the controller's machine can connect."""

    def __repr__(self) -> str:
        return f"<DeskAddress {self.where!r}>"


class ClusterHandle(CallSurface[W_co], Closing):
    """A Cluster that can be passed to other processes, such as Ray actors.

    ``cluster.handle()`` makes one, and so does pickling the cluster. Its calls are those of the
    Cluster, with the same results and errors, and begin in the order in which the handle sends
    them. The controller makes the calls, so they end when it does. If a call returns a list of the
    ranks' results, iterating over its future yields a future for each, else one for the result; all
    are done together. A process connects with its first call.

    Args:
        name: Name of the cluster.
        topology: Coordinates of its ranks.
        address: Address at which the cluster's controller listens.
    """

    def __init__(self, name: str, topology: Topology, address: DeskAddress) -> None:
        self.name = name
        self.topology = topology
        self.address = address
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._request_ids = itertools.count(1)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.topology, self.address)

    def __repr__(self) -> str:
        return f"<ClusterHandle {self.name!r} of {self.world_size} ranks>"

    def close(self) -> None:
        """Close the connection; the cluster is not affected. Idempotent; a later call reconnects.

        Calls in flight fail in this process, and continue in the workers.
        """
        channel, self._channel = self._channel, None

        async def close() -> None:
            if channel is not None:
                channel.close("the handle was closed")

        run_sync(close())

    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> GroupFuture[Any]:
        """Start a call without blocking; its arguments are packed here, in the caller's thread."""
        if options.keep:
            raise DispatchError(
                method=spec.full_name,
                reason="keep needs the cluster's own controller, and this is a handle",
                step="Call it without keep, or keep the results in the script that has the Cluster",
            )
        require_seconds(f"{self.name}.{spec.name}", options.timeout)
        packed = Packed(encode_arguments(self.name, "", spec.name, (args, kwargs)))
        request = Request(next(self._request_ids), Verb.CALL, self.name, spec.name)
        outgoing = Outgoing(request, encode((spec, options, packed)))

        async def run() -> list[Any]:
            async with self._opening:
                channel = await self._opened()
                answer = _CallOutcome(self.name)
                channel.post(outgoing, answer)
            result: Any = decode(await answer.payload)
            results: list[Any] = result if spec.collects_all else [result]
            return results

        mode, ranks = spec.dispatch_mode, range(self.world_size if spec.collects_all else 1)
        called = mode.ranks if isinstance(mode, Unregistered) else ranks
        parts = RankFutures([f"{self.name}/{rank}" for rank in called])
        collect: Callable[[list[Any]], Any] = list if spec.collects_all else operator.itemgetter(0)
        sent = submit(run())
        return GroupFuture(sent, collect, forbid_blocking, lambda: parts.make(sent))

    async def _opened(self) -> Channel:
        if self._channel is None or not self._channel.is_open:
            where, key = self.address.where, self.address.key
            channel = Channel(
                f"controller of {self.name}",
                functools.partial(connect, where, key, _CONNECT_S, tls=self.address.tls),
                _Controller(),
                shares_memory=self.address.shares_memory,
            )
            try:
                await channel.open()
            except (OSError, ProtocolError) as error:
                raise _lost(self.name, error) from error
            self._channel = channel
        return self._channel


class _CallOutcome:
    """The outcome of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.payload: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()

    def replied(self, reply: Reply, payload: Payload) -> None:
        if self.payload.done():
            return  # its waiter was cancelled
        if reply.ok:
            self.payload.set_result(payload)
        else:
            self.payload.set_exception(error_in(payload))

    def failed(self, error: Exception) -> None:
        if not self.payload.done():
            self.payload.set_exception(_lost(self._name, error))


def _lost(name: str, error: Exception) -> HelmsmanError:
    return HelmsmanError(
        f"the controller of Cluster {name!r} cannot be reached: {error}. The script that made the "
        "Cluster has ended or closed it, or the network between them fails. Calls in flight may "
        "have run"
    )


class _Controller:
    """The process at the other end, which a handle neither watches nor ends."""

    async def ending(self, lost_because: str) -> Ending:
        return Ending(lost_because)

    async def observe(self, limit_s: float) -> bytes:
        return b""

    async def wait_ended(self, limit_s: float) -> None:
        """It continues."""

    async def kill(self) -> None:
        """It continues."""


# --- the cluster's end ----------------------------------------------------------------------------


class ClusterDesk(Closing):
    """Listens for the handles of a cluster, and calls it for them.

    Args:
        cluster: The cluster.
        address: Address of this machine for handles on any machine; None for handles on this
            machine alone.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, cluster: WorkerGroup[Any], address: str | None) -> None:
        self._cluster = cluster
        self._answers = concurrent.futures.ThreadPoolExecutor(_ANSWER_THREADS, "cluster handles")
        key, tls = secrets.token_bytes(32), None
        if shares_memory := address is None and sys.platform == "linux":
            listener = listen_abstract()
        else:
            first, last = port_range(os.environ)
            listener = listen_tcp(address or "127.0.0.1", range(first, last + 1))
            tls = server_tls() if address is not None and uses_tls(os.environ) else None
        where = listener.getsockname()
        self.address = DeskAddress(
            where.decode() if isinstance(where, bytes) else where[:2],
            key,
            tls is not None,
            shares_memory,
        )
        self._server = ChannelServer(listener, key, self, shares_memory=shares_memory, tls=tls)
        self._server.start()

    def handle(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        """Begin a call and answer it later. Called in the order of each handle's calls."""

        def answer(future: GroupFuture[Any]) -> None:
            self._answers.submit(self._answer, request, future, reply)

        try:
            spec, options, (args, kwargs) = decode(payload)
            future = GroupMethod[..., Any](self._cluster, spec, options).submit(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the caller's
            reply(Reply(request.id, False), _encoded(error))
        else:
            future.add_done_callback(answer)

    def _answer(self, request: Request, future: GroupFuture[Any], reply: ReplyFn) -> None:
        try:
            result = encode(future.result())
            reply(Reply(request.id, True), result)
        except Exception as error:  # noqa: BLE001 - the caller's
            reply(Reply(request.id, False), _encoded(error))

    def close(self) -> None:
        """Accept no further handles; begun calls are still answered. Idempotent."""
        self._server.close()
        self._answers.shutdown(wait=False)


def _encoded(error: Exception) -> Payload:
    """Encode an error; one that cannot be pickled becomes its text."""
    with contextlib.suppress(Exception):
        return encode(error)
    return encode(ProtocolError(f"{type(error).__name__}: {error}"))


def address_for_others(addresses: Collection[str]) -> str | None:
    """Return the address of this machine in a cluster of machines; None if it is the only one.

    Args:
        addresses: Addresses of all nodes.

    Raises:
        HelmsmanError: None of them is this machine's.
    """
    own = {address for address in addresses if _is_own(address)}
    if own.issuperset(addresses):
        return None
    if not own:
        raise HelmsmanError(
            f"this machine has none of the addresses of the cluster's nodes, which are "
            f"{', '.join(sorted(addresses))}; pass the address at which these nodes reach this "
            "machine: handle(address=...)"
        )
    return min(own)


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False
