"""CallSurface: the calls of a worker group, by declaration or by name, on all ranks or on some.

Also the futures of the single ranks of a call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from helmsman._base.event_loop import run_on_loop
from helmsman.api.dispatch import Execute, MethodSpec, Unregistered
from helmsman.api.fan_out import Fanout
from helmsman.api.topology import RankInfo
from helmsman.api.worker_group import (
    GroupFuture,
    Options,
    RegisteredMethod,
    WorkerGroup,
)
from helmsman.controller._scheduler.argument_types import require_integer

W_co = TypeVar("W_co", covariant=True)
_Future: TypeAlias = "concurrent.futures.Future[Any]"
Method: TypeAlias = str | RegisteredMethod[Any, ..., Any, Any]
"""Name of a method, or a method declared with ``register``."""


class CallSurface(WorkerGroup[W_co]):
    """The calls of a worker group.

    Each call is a MethodSpec, whether it is declared or made by name, and goes to ``_begin``, which
    the two transports implement: Cluster sends it to the workers, ClusterHandle to the Cluster in
    another process.
    """

    name: str
    """Role of the workers."""

    def get_rank_info(self, rank: int) -> RankInfo:
        """Coordinates of a rank, as computed by the controller.

        Raises:
            IndexError: The group has no such rank.
        """
        require_integer("get_rank_info", "rank", rank)
        return self.topology.get_rank_info(rank)

    def execute_rank_zero_sync(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method on rank 0 only and wait for its result.

        Args:
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments of the method.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.
            kwargs: Keyword arguments of the method.

        Returns:
            The result of rank 0.

        Raises:
            DispatchError: An argument is a Shard that has no rows, or more than one part. Nothing
                is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
            CallError: The call failed on rank 0.
        """
        return self.execute_rank_zero_async(method, *args, timeout=timeout, **kwargs).awaited()

    def execute_rank_zero_async(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> GroupFuture[Any]:
        """Call a method on rank 0 only, without waiting.

        Args:
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments of the method.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.
            kwargs: Keyword arguments of the method.

        Returns:
            A future of rank 0's result, which raises CallError if the call fails.

        Raises:
            DispatchError: An argument is a Shard that has no rows, or more than one part. Nothing
                is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
        """
        return self._submit([0], method, args, kwargs, timeout, Execute.RANK_ZERO)

    def execute_all_sync(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all ranks and wait for all results.

        Args:
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments. Each rank gets them unchanged, lists included, except that a
                ``Shard(x)`` is split.
            timeout: Limit in seconds for all ranks together; ``timeouts.call_s`` of the scheduler
                when None.
            kwargs: Keyword arguments, treated like ``args``.

        Returns:
            The results in rank order.

        Raises:
            DispatchError: A Shard holds a value without rows. Nothing is sent.
            UnevenBatchError: The rows of a Shard do not divide evenly. Nothing is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
            GroupCallError: The call failed on some ranks; the root cause comes first. A group of
                one rank raises that rank's error.
        """
        return self.execute_all_async(method, *args, timeout=timeout, **kwargs).awaited()

    def execute_all_async(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> GroupFuture[list[Any]]:
        """Call a method on all ranks, without waiting.

        Args:
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments. Each rank gets them unchanged, lists included, except that a
                ``Shard(x)`` is split.
            timeout: Limit in seconds for all ranks together; ``timeouts.call_s`` of the scheduler
                when None.
            kwargs: Keyword arguments, treated like ``args``.

        Returns:
            A future of the results in rank order. It raises GroupCallError, root cause first, if
            the call fails on some ranks, or the rank's error in a group of one rank.

        Raises:
            DispatchError: A Shard holds a value without rows. Nothing is sent.
            UnevenBatchError: The rows of a Shard do not divide evenly. Nothing is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
        """
        return self._submit(range(self.world_size), method, args, kwargs, timeout)

    def execute_on(
        self,
        ranks: Sequence[int],
        method: Method,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method on selected ranks and wait for their results.

        Args:
            ranks: Ranks to call, each at most once.
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments. A ``Shard(x)`` is split over all ranks of the group; the
                parts of ranks that are not called are not sent.
            timeout: Limit in seconds for all ranks together; ``timeouts.call_s`` of the scheduler
                when None.
            kwargs: Keyword arguments, treated like ``args``.

        Returns:
            The results in the order of ``ranks``.

        Raises:
            ValueError: ``ranks`` is empty or repeats a rank.
            IndexError: The group has no such rank.
            DispatchError: A Shard cannot be split. Nothing is sent.
            UnevenBatchError: The rows of a Shard do not divide evenly. Nothing is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
            GroupCallError: The call failed on some ranks; the root cause comes first. A call of one
                rank raises that rank's error.
        """
        future = self.execute_on_async(ranks, method, *args, timeout=timeout, **kwargs)
        return future.awaited()

    def execute_on_async(
        self,
        ranks: Sequence[int],
        method: Method,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> GroupFuture[list[Any]]:
        """Call a method on selected ranks, without waiting.

        Args:
            ranks: Ranks to call, each at most once.
            method: Name of the method, or a declared method, whose declaration is ignored.
            args: Positional arguments. A ``Shard(x)`` is split over all ranks of the group; the
                parts of ranks that are not called are not sent.
            timeout: Limit in seconds for all ranks together; ``timeouts.call_s`` of the scheduler
                when None.
            kwargs: Keyword arguments, treated like ``args``.

        Returns:
            A future of the results in the order of ``ranks``; iterating over it yields a future of
            each rank. It raises GroupCallError, root cause first, if the call fails on some ranks,
            or the rank's error in a call of one rank.

        Raises:
            ValueError: ``ranks`` is empty or repeats a rank.
            IndexError: The group has no such rank.
            DispatchError: A Shard cannot be split. Nothing is sent.
            UnevenBatchError: The rows of a Shard do not divide evenly. Nothing is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
        """
        ranks = [self.get_rank_info(rank).rank for rank in ranks]
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks are {ranks}, expected at least one and no duplicates")
        return self._submit(ranks, method, args, kwargs, timeout)

    def _submit(
        self,
        ranks: Sequence[int],
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        execute_mode: Execute = Execute.ALL,
    ) -> GroupFuture[Any]:
        """Call a method by its name, without the declaration that it may have."""
        spec = MethodSpec(
            name=method if isinstance(method, str) else self.method(method).spec.name,
            owner=self.name,
            dispatch_mode=Unregistered(ranks),
            execute_mode=execute_mode,
        )
        return self._begin(spec, args, kwargs, Options(timeout))


class RankFutures:
    """Makes the futures of a call's ranks when they are requested; most calls need none.

    Args:
        worker_ids: Workers whose results the call returns, in their order.
    """

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self._futures: dict[str, _Future] = {}
        """Changed and read on the event loop alone, like the fan-out."""
        self._worker_ids = worker_ids
        self._fanout: Fanout | None = None

    def follow(self, fanout: Fanout) -> None:
        """Take results from a fan-out; runs on the event loop."""
        self._fanout = fanout
        fanout.on_end = self._ended
        for worker_id in (*fanout.results, *fanout.failures):
            self._ended(worker_id)

    def make(self, call: _Future) -> list[_Future]:
        """Make the futures, in the order of the workers.

        A rank without an outcome of its own gets that of the call: its result in the list of
        results, or the call's error or cancellation.
        """
        made: dict[str, _Future] = {
            worker_id: concurrent.futures.Future() for worker_id in self._worker_ids
        }

        def done(_: _Future) -> None:
            for index, future in enumerate(made.values()):
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # has an outcome
                    if call.cancelled():
                        future.cancel()
                    elif (error := call.exception()) is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(call.result()[index])

        def attach() -> None:
            self._futures = made
            if self._fanout is not None:
                self.follow(self._fanout)
            call.add_done_callback(done)

        run_on_loop(attach)
        return list(made.values())

    def _ended(self, worker_id: str) -> None:
        if self._fanout is None or (future := self._futures.get(worker_id)) is None:
            return
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if (error := self._fanout.failures.get(worker_id)) is not None:
                future.set_exception(error)
            else:
                future.set_result(self._fanout.results[worker_id])
