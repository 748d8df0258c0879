"""The one fan-out: an operation on all ranks of a role under one deadline, with one error that
names the root cause first.

When one rank fails, its peers fail a moment later with broken connections, or hang in a collective:
these are only counted.
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
"""How long the other ranks may still end by themselves after the first failure, in seconds."""

DEATH_GRACE_S = 0.25
"""How long they get after a death, which what they say would not explain, in seconds."""

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
"""How gloo, NCCL, HCCL and torch's store say that a peer is gone or late."""

_ON_ANOTHER_RANK = "failed on another rank, so this one did not go on"
"""Message of ranks that have agreed on the failure of one of them (`failing_together` in
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
) -> list[Any]:
    """Call ``method`` on every worker of ``calls`` at once and return the results in the order of
    ``calls``.

    Args:
        calls: worker id -> its arguments.
        engine_name: name of the engine in each worker; the worker's id when None.
        timeout: seconds for all calls together; the scheduler's ``timeouts.call_s`` when None.
        grace_s: seconds that the other calls still get after the first failure, for ranks that wait
            for each other; None waits for each of them, for workers that are independent.
    Raises: the error itself when one worker is called, GroupCallError (root cause first) when
        several are.
    """
    keeps = any((call.rpc_meta or {}).get("keep") for call in calls.values())

    def forget(result: Any) -> None:
        if isinstance(result, ResultHandle):
            # it blocks
            asyncio.get_running_loop().run_in_executor(None, release, scheduler, result)

    work = scheduler.call_many(calls, method, engine_name, timeout)
    return await _gather(
        role, method, list(calls), work, grace_s=grace_s, forget=forget if keeps else None
    )


def release(scheduler: Scheduler, handle: ResultHandle) -> None:
    """Release what nobody needs any more; where that fails, the memory comes back with the worker's
    end. Blocks.
    """
    try:
        scheduler.release(handle)
    except HelmsmanError as error:
        logger.warning(
            "%s keeps what nobody needs any more, %s: %s", handle.worker_id, handle.summary, error
        )


async def gather_all(
    role: str,
    operation: str,
    work: Mapping[str, Awaitable[Any]],
    *,
    grace_s: float | None = DEFAULT_GRACE_S,
) -> list[Any]:
    """Await one operation per worker, all at once, and return their results in order; errors as for
    call_all.

    Calls that still run when the error is raised are left to their workers; how each ends is
    logged. Cancelling cancels all of them.
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
) -> list[Any]:
    """The results of a fan-out, in the order of ``worker_ids``; ``forget`` is given each that is
    not returned.
    """
    try:
        await work.wait(until_failure=True)
        if work.pending:
            died = any(isinstance(error, WorkerFailedError) for error in work.failures.values())
            await work.wait(
                timeout_s=min(grace_s, DEATH_GRACE_S) if died and grace_s is not None else grace_s
            )
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
    """The one exception for failures of a role's workers, given earliest first and at least one.

    One worker's operation gets its error itself. An exception that is not ours is a defect of the
    driver and comes first.
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
    """0: failed by itself; 1: waited for a peer or lost it, or cannot be told; 2: says itself that
    a peer is to blame.
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
    """Whether an engine's exception says that a peer is gone or late, rather than what went
    wrong.
    """
    return error.remote_type.rpartition(".")[2] in _COMMUNICATION_TYPES or bool(
        _COMMUNICATION_TEXT.search(error.remote_message)
    )


def observe(awaitable: Awaitable[Any], what: str) -> None:
    """Let an operation run on unawaited: it is kept alive, and how it ends is logged."""
    work = Fanout()
    work.expect_awaitable(what, awaitable)
    work.observe(what, what, None)
