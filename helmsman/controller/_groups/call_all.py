"""Fan-out of an operation to all ranks of a role, under one deadline and with one error.

When a rank fails, its peers fail shortly after with broken connections, or hang in a collective.
The error names the root cause first and only counts these consequences.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from helmsman.api.errors import (
    CallTimeoutError,
    EngineCallError,
    GroupCallError,
    HelmsmanError,
    PeerNotReadyError,
    WorkerFailedError,
)
from helmsman.api.fan_out import Fanout
from helmsman.api.scheduler import Call, ResultHandle, Scheduler

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 2.0
"""Seconds in which the other ranks may still end by themselves after the first failure."""

DEATH_GRACE_S = 0.25
"""The same after a worker's death, in seconds; errors of peers would not explain the death."""

_COMMUNICATION_TYPES = frozenset(
    {"BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"}
    | {"DistBackendError", "DistNetworkError", "DistStoreError"}
)
_COMMUNICATION_TEXT = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe|socket (closed|timeout)|connection "
    r"timed? ?out|"
    r"timed out waiting|wait timeout after|client socket has timed out|application timeout caused "
    r"pair closure|"
    r"failed to connect to|remote process exit(ed|ing)|"
    r"nccl(RemoteError|SystemError)|watchdog (caught|got)|hccl.*time ?out",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL, HCCL and torch's store for a peer that has exited or is late."""

_ON_ANOTHER_RANK = "failed on another rank, so this one did not go on"
"""Message of ranks that stop because another rank has failed (`failing_together` in
engines/_models/distributed.py).
"""


async def call_all(
    scheduler: Scheduler,
    role: str,
    method: str,
    calls: Mapping[str, Call],
    *,
    engine_name: str | None = None,
    timeout: float | None = None,
    grace_s: float | None = DEFAULT_GRACE_S,
    follow: Callable[[Fanout], None] | None = None,
    release_peers: Callable[[], Awaitable[None]] | None = None,
) -> list[Any]:
    """Call a method on several workers at once.

    Args:
        scheduler: Sends the calls.
        role: Role of the workers.
        method: Name of the engine method.
        calls: Worker id -> its arguments.
        engine_name: Name of the engine in each worker; the worker's id when None.
        timeout: Limit in seconds for all calls; the scheduler's ``timeouts.call_s`` when None.
        grace_s: Seconds for which the other calls are awaited after the first failure, for ranks
            that wait for each other; none is sent if one cannot be. None awaits all calls, for
            independent workers.
        follow: Called with the calls once they have begun.
        release_peers: Called when other calls still run ``grace_s`` after the first failure. They
            are then awaited for ``grace_s`` again.

    Returns:
        The results in the order of ``calls``.

    Raises:
        GroupCallError: A call failed; the root cause comes first. A call to one worker raises its
            CallError.
    """
    keeps = any((call.rpc_meta or {}).get("keep") for call in calls.values())

    def forget(result: Any) -> None:
        if isinstance(result, ResultHandle):
            # In a thread, since it blocks.
            asyncio.get_running_loop().run_in_executor(None, release, scheduler, result)

    work = scheduler.call_many(calls, method, engine_name, timeout, all_or_none=grace_s is not None)
    if follow is not None:
        follow(work)
    return await _gather(
        role,
        method,
        list(calls),
        work,
        grace_s=grace_s,
        forget=forget if keeps else None,
        release_peers=release_peers,
    )


def release(scheduler: Scheduler, handle: ResultHandle) -> None:
    """Release a handle that is no longer needed. Blocks; a failure is only logged.

    The memory of a handle that was not released is freed when its worker ends.
    """
    try:
        scheduler.release(handle)
    except HelmsmanError as error:
        logger.warning(
            "%s: result %s was not released: %s", handle.worker_id, handle.summary, error
        )


async def gather_all(
    role: str,
    operation: str,
    work: Mapping[str, Awaitable[Any]],
    *,
    grace_s: float | None = DEFAULT_GRACE_S,
) -> list[Any]:
    """Await one operation per worker, all at once, and return the results in order.

    Calls that are in flight when the error is raised continue at their workers, and their outcome
    is logged. Cancelling cancels all calls.

    Raises:
        GroupCallError: A call failed; the root cause comes first. A call to one worker raises its
            CallError.
    """
    fanout = Fanout()
    for worker_id, each in work.items():
        fanout.expect_awaitable(worker_id, each)
    return await _gather(role, operation, list(work), fanout, grace_s=grace_s, forget=None)


async def _gather(
    role: str,
    operation: str,
    worker_ids: Sequence[str],
    work: Fanout,
    *,
    grace_s: float | None,
    forget: Callable[[Any], None] | None,
    release_peers: Callable[[], Awaitable[None]] | None = None,
) -> list[Any]:
    """Return the results in the order of ``worker_ids``; pass discarded ones to ``forget``."""
    try:
        await work.wait(until_failure=True)
        if work.pending:
            died = any(isinstance(error, WorkerFailedError) for error in work.failures.values())
            await work.wait(
                timeout_s=min(grace_s, DEATH_GRACE_S) if died and grace_s is not None else grace_s
            )
        if work.pending and release_peers is not None:
            await release_peers()
            await work.wait(timeout_s=grace_s)
    except asyncio.CancelledError:
        for worker_id, member in list(work.pending.items()):
            work.observe(worker_id, f"{worker_id}: {operation} (its caller was cancelled)", forget)
            member.cancel()
        _forget_all(work, forget)
        raise
    for worker_id in work.pending:
        work.observe(
            worker_id, f"{worker_id}: {operation} (left alone after another rank failed)", forget
        )
    failures: dict[str, Exception] = {}
    for worker_id, error in work.failures.items():
        if isinstance(error, asyncio.CancelledError):
            error = HelmsmanError(
                f"{worker_id}: the wait for {operation} was cancelled", worker_id=worker_id
            )
        if not isinstance(error, Exception):
            raise error
        failures[worker_id] = error
    if failures:
        _forget_all(work, forget)
        raise group_error(role, operation, failures, len(worker_ids))
    return [work.results[worker_id] for worker_id in worker_ids]


def _forget_all(work: Fanout, forget: Callable[[Any], None] | None) -> None:
    if forget is not None:
        for result in work.results.values():
            forget(result)


def group_error(
    role: str, operation: str, failures: Mapping[str, Exception], num_ranks: int
) -> Exception:
    """Return one exception for at least one failure of a role's workers, given earliest first.

    An operation on one worker gets the failure itself. An exception that is not a HelmsmanError is
    a defect of the driver, and is returned alone.
    """
    ordered = dict(sorted(failures.items(), key=lambda item: _distance_from_cause(item[1])))
    first = next(iter(ordered.values()))
    ours = {
        worker_id: error for worker_id, error in ordered.items() if isinstance(error, HelmsmanError)
    }
    if num_ranks == 1 or not isinstance(first, HelmsmanError):
        return first
    error = GroupCallError(
        role=role, method=operation, first=first, errors=ours, num_ranks=num_ranks
    )
    error.__cause__ = first
    return error


def _distance_from_cause(error: Exception) -> int:
    """Rank an error by its distance from the root cause.

    0: the rank itself failed. 1: it waited for a peer or lost it, or the cause is unclear. 2: the
    error states that a peer failed. -1: a defect of the driver.
    """
    if not isinstance(error, HelmsmanError):
        return -1
    if isinstance(error, PeerNotReadyError) or (
        isinstance(error, EngineCallError) and _ON_ANOTHER_RANK in error.remote_message
    ):
        return 2
    if isinstance(error, CallTimeoutError) or (
        isinstance(error, EngineCallError) and is_communication_error(error)
    ):
        return 1
    return 0


def is_communication_error(error: EngineCallError) -> bool:
    """Return whether an engine's exception only reports that a peer has exited or is late."""
    return error.remote_type.rpartition(".")[2] in _COMMUNICATION_TYPES or bool(
        _COMMUNICATION_TEXT.search(error.remote_message)
    )


def observe(awaitable: Awaitable[Any], what: str) -> None:
    """Keep an operation running without awaiting it, and log its outcome."""
    work = Fanout()
    work.expect_awaitable(what, awaitable)
    work.observe(what, what, None)
