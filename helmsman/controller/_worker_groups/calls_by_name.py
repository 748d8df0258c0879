"""Calls of a worker group's methods by name, without a declaration."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from helmsman.api.topology import RankInfo
from helmsman.api.worker_group import GroupFuture, RegisteredMethod, WorkerGroup
from helmsman.controller._validation.argument_types import require_integer

W_co = TypeVar("W_co", covariant=True)
Method: TypeAlias = str | RegisteredMethod[Any, ..., Any, Any]
"""Name of a method, or a method declared with ``register``."""


class CallsByName(WorkerGroup[W_co]):
    """A worker group whose methods can be called by name, on all ranks or on some."""

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
        return self._execute(method, [0], args, kwargs, timeout, lambda results: results[0])

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
        return self._execute(method, range(self.world_size), args, kwargs, timeout, list)

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
        return self._execute(method, ranks, args, kwargs, timeout, list)

    @abc.abstractmethod
    def _execute(
        self,
        method: Method,
        ranks: Sequence[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        collect: Callable[[list[Any]], Any],
    ) -> GroupFuture[Any]:
        """Call a method on these ranks; ``collect`` gets the results in their order."""
