"""ClusterHandle: a Cluster as another process calls it, through the cluster's controller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from helmsman._base.auth import connect
from helmsman.api.closing import Closing
from helmsman.api.dispatch import CustomDispatch, MethodSpec
from helmsman.api.errors import DispatchError, HelmsmanError, ProtocolError
from helmsman.api.topology import Topology
from helmsman.api.worker_group import GroupFuture, Options
from helmsman.controller._aio.event_loop import forbid_blocking, run_sync, submit
from helmsman.controller._transport.base import Ending, error_in
from helmsman.controller._transport.channel import Channel
from helmsman.controller._validation.argument_types import require_seconds
from helmsman.controller._worker_groups.calls_by_name import CallsByName, Method
from helmsman.controller._worker_groups.cluster_desk import DeskAddress, GroupCall
from helmsman.controller._worker_groups.rank_futures import settle
from helmsman.rpc_server._wire.codec import Packed, Payload, decode, encode, encode_arguments
from helmsman.rpc_server._wire.messages import Reply, Request, Verb
from helmsman.rpc_server._wire.wire import Outgoing

W_co = TypeVar("W_co", covariant=True)

_CONNECT_S = 10.0


class ClusterHandle(CallsByName[W_co], Closing):
    """A Cluster that can be passed to other processes, such as Ray actors.

    ``cluster.handle()`` makes one, and so does pickling the cluster. Its calls are those of the
    Cluster, with the same results and errors, and begin in the order in which the handle sends
    them. The controller makes the calls, so they end when it does. If a call returns a list of the
    ranks' results, iterating over its future yields a future for each; all are done together. A
    process connects with its first call.

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

    def _execute(
        self,
        method: Method,
        ranks: Sequence[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        collect: Callable[[list[Any]], Any],
    ) -> GroupFuture[Any]:
        name = method if isinstance(method, str) else self.method(method).spec.name
        call = GroupCall(name, list(ranks), timeout)
        return self._send(name, call, (args, kwargs), collect, len(ranks))

    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
    ) -> GroupFuture[Any]:
        if options.keep:
            raise DispatchError(
                method=spec.full_name,
                reason="keep needs the cluster's own controller, and this is a handle",
                step="Call it without keep, or keep the results in the script that has the Cluster",
            )
        call = GroupCall(spec, (), options.timeout)
        is_list = spec.collects_all or isinstance(spec.dispatch_mode, CustomDispatch)
        num_parts = self.world_size if is_list else 0
        return self._send(spec.name, call, (args, kwargs), lambda result: result, num_parts)

    def _send(
        self,
        method: str,
        call: GroupCall,
        arguments: tuple[Any, ...],
        collect: Callable[[Any], Any],
        num_parts: int,
    ) -> GroupFuture[Any]:
        """Start a call without blocking; its arguments are packed here, in the caller's thread."""
        require_seconds(f"{self.name}.{method}", call.timeout)
        packed = Packed(encode_arguments(self.name, "", method, arguments))
        request = Request(next(self._request_ids), Verb.CALL, self.name, method)
        outgoing = Outgoing(request, encode((call, packed)))

        async def run() -> Any:
            async with self._opening:
                channel = await self._opened()
                answer = _Answer(self.name)
                channel.post(outgoing, answer)
            return decode(await answer.payload)

        def parts() -> list[concurrent.futures.Future[Any]]:
            futures = [concurrent.futures.Future[Any]() for _ in range(num_parts)]
            settle(futures, sent)
            return futures

        sent = submit(run())
        return GroupFuture(sent, collect, forbid_blocking, parts)

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


class _Answer:
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
