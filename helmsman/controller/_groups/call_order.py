"""The order of a group's calls, the check of rank coordinates, and packed arguments."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from helmsman._wire.codec import Packed, encode
from helmsman.api.errors import (
    ArgumentNotSerializableError,
    CallTimeoutError,
    HelmsmanError,
    MethodNotFoundError,
    NotSerializableError,
    TopologyMismatchError,
)
from helmsman.api.scheduler import Call, ResultHandle, Scheduler
from helmsman.api.topology import AXES, RankInfo, Topology
from helmsman.controller._groups.dispatch import Argument, Dispatched


class CallOrder:
    """Keeps the calls of a group in submission order, at most ``max_concurrency`` in flight.

    It is used on Helmsman's event loop. ``check`` compares the ranks' coordinates within a limit in
    seconds; it runs before the first call that splits rows along an axis.
    """

    def __init__(
        self, name: str, max_concurrency: int | None, check: Callable[[float], Awaitable[None]]
    ) -> None:
        self.is_checked = False
        self._name = name
        self._check = check
        self._lock = asyncio.Lock()
        """Held during the coordinate check, so that later calls wait behind the call that runs it.
        """
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def enter(
        self, method: str, limit_s: float | None, deadline: float, *, is_cut: bool
    ) -> float | None:
        """Wait for a pending coordinate check; run the check before the first call that is cut.

        The lock serves waiting calls in their order, and nothing is awaited between its release and
        the sending of a call, so calls reach the workers in the order in which they were made.

        Returns:
            Seconds left for the call itself; ``limit_s``, its timeout argument, if it did not wait.

        Raises:
            CallTimeoutError: The deadline, by time.monotonic(), has passed.
            HelmsmanError: The check failed.
        """
        waits = self._lock.locked() or (is_cut and not self.is_checked)
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline - began):
                await self._lock.acquire()
        except TimeoutError as error:
            raise CallTimeoutError(
                worker_id=f"{self._name}/0",
                engine_name=None,
                method=method,
                elapsed_s=time.monotonic() - began,
                limit_s=deadline - began,
                limit_source="Timeouts.call_s"
                if limit_s is None
                else "the call's timeout argument",
                worker_alive=True,
                state="the call was not sent: an earlier call still waits for the coordinates of "
                "the ranks",
                stack="",
            ) from error
        try:
            if is_cut and not self.is_checked:
                await self._check(max(0.0, deadline - time.monotonic()))
                self.is_checked = True
        finally:
            self._lock.release()
        return max(0.0, deadline - time.monotonic()) if waits else limit_s

    @contextlib.asynccontextmanager
    async def slot(self, limit_s: float | None, deadline: float) -> AsyncIterator[float | None]:
        """Wait until the call may run; yields the seconds that it may take."""
        if self._slots is None:
            yield limit_s
            return
        async with self._slots:
            yield max(0.0, deadline - time.monotonic())


async def compare_coordinates(
    cluster: str,
    engine: str | type[Any],
    topology: Topology,
    call: Callable[..., Awaitable[list[Any]]],
    limit_s: float,
) -> None:
    """Compare the coordinates that workers report with the controller's.

    Does nothing if the workers' class has no ``get_rank_info``. ``call`` takes the method's name,
    the calls by worker id and a limit in seconds.

    Raises:
        TopologyMismatchError: Coordinates differ.
        GroupCallError: Workers did not reply.
    """
    if not (isinstance(engine, str) or hasattr(engine, "get_rank_info")):
        return
    calls = {
        f"{cluster}/{info.rank}": Call(rpc_meta={"broadcast": False}) for info in topology.ranks
    }
    try:
        told = await call("get_rank_info", calls, limit_s)
    except HelmsmanError as error:
        if not _is_missing_method(error):
            raise
        return
    differences = {
        worker_id: told_apart
        for worker_id, ours, theirs in zip(calls, topology.ranks, told, strict=True)
        if (told_apart := _difference(ours, theirs)) is not None
    }
    if differences:
        raise TopologyMismatchError(
            cluster=cluster, num_ranks=topology.world_size, differences=differences
        )


def _is_missing_method(error: HelmsmanError) -> bool:
    return isinstance(error, MethodNotFoundError) or isinstance(
        getattr(error, "first", None), MethodNotFoundError
    )


def _difference(ours: RankInfo, theirs: Any) -> tuple[str, str] | None:
    """(computed, reported) values of the fields that differ; None if all reported fields agree."""
    if theirs is None:
        return None
    if isinstance(theirs, Mapping):
        named = dict(theirs)
    else:
        names = [
            "rank",
            "world_size",
            *(f"{axis}_{what}" for axis in AXES for what in ("rank", "size")),
        ]
        named = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    wrong = [name for name, value in named.items() if getattr(ours, name, None) != value]
    if not wrong:
        return None

    def shown(value_of: Callable[[str], Any]) -> str:
        return ", ".join(f"{name}={value_of(name)}" for name in wrong)

    return shown(lambda name: getattr(ours, name, "unknown")), shown(named.__getitem__)


_PUT_FROM_BYTES = 64 * 1024
"""Larger arguments for several ranks are put in the store, from which each node fetches them once;
the others are sent in messages.
"""


class PackedArguments:
    """The packed arguments of each rank, ready to be sent.

    Everything is packed in the caller's thread before anything is sent, so if packing fails, no
    rank has received the call.
    """

    def __init__(self, scheduler: Scheduler, method: str, dispatched: Dispatched) -> None:
        """Pack a call.

        Raises:
            ArgumentNotSerializableError: An argument cannot be pickled.
        """
        self._scheduler = scheduler
        self._put: list[ResultHandle] = []
        self._calls: dict[tuple[int | None, ...], Call] = {}
        """Calls by the part indices of the arguments that differ between ranks."""

        def one(name: str, argument: Argument) -> Argument:
            receivers = Counter(argument.of_rank[rank] for rank in dispatched.ranks)
            names = (
                [name]
                if len(argument.parts) == 1
                else [f"{name}<part {number}>" for number in range(len(argument.parts))]
            )
            starts = argument.starts or [0] * len(argument.parts)
            parts = [
                self._pack(method, names[number], part, receivers[number], starts[number])
                if receivers[number]
                else None
                for number, part in enumerate(argument.parts)
            ]
            return Argument(parts, argument.of_rank)

        try:
            self._args = [
                one(f"args[{index}]", argument) for index, argument in enumerate(dispatched.args)
            ]
            self._kwargs = {
                name: one(f"kwargs[{name!r}]", argument)
                for name, argument in dispatched.kwargs.items()
            }
        except BaseException:
            self.release()
            raise
        every = (*self._args, *self._kwargs.values())
        self._cut = [
            argument for argument in every if len(argument.parts) > 1 or None in argument.of_rank
        ]
        """Arguments that differ between ranks."""

    def call_of(self, rank: int, rpc_meta: Mapping[str, Any]) -> Call:
        """Build the call of a rank; ranks with the same arguments share one payload."""
        numbers = tuple([argument.of_rank[rank] for argument in self._cut])
        call = self._calls.get(numbers)
        if call is None:
            args = tuple(argument.for_rank(rank) for argument in self._args)
            kwargs = {name: argument.for_rank(rank) for name, argument in self._kwargs.items()}
            call = self._calls[numbers] = Call(args, kwargs, payload=encode((args, kwargs)))
        return call._replace(rpc_meta=rpc_meta)

    def release(self) -> None:
        """Release the values that were put, once all ranks have replied."""
        for handle in self._put:
            self._scheduler.release(handle)

    def _pack(self, method: str, name: str, value: Any, num_receivers: int, start: int) -> Any:
        try:
            packed = Packed(encode(value, root=name))
        except NotSerializableError as error:
            worker_id, _, method = method.partition(".")
            # 'args[0]<part 1>[2].x' is 'args[0][6].x' in the caller's list if the part starts at
            # row 4.
            row = re.compile(r"<part \d+>\[(\d+)\]")
            path = (
                row.sub(lambda found: f"[{start + int(found[1])}]", error.path, 1)
                if isinstance(value, list)
                else error.path
            )
            raise ArgumentNotSerializableError(
                worker_id=worker_id,
                engine_name=None,
                method=method,
                path=path,
                value_type=error.value_type,
                reason=error.reason,
            ) from error
        small = packed.payload.nbytes < _PUT_FROM_BYTES
        if small or num_receivers < 2 or packed.payload.handles or self._scheduler.shares_process:
            return packed
        self._put.append(self._scheduler.put(packed))
        return self._put[-1]
