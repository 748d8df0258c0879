"""Results of several requests, together or as they end; requests whose caller leaves early are withdrawn.

A request that was put ends in any case, so a caller waits no longer than that takes. A caller that leaves early, by an error,
an interrupt or a ``break``, leaves nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from helmsman.api.errors import SchedulerClosedError
from helmsman.api.generation import GenerationResult
from helmsman.controller._aio.event_loop import run_async, run_on_loop, run_sync
from helmsman.controller._generation.request import Ticket
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._roles.call_all import DEFAULT_GRACE_S, group_error, observe

OnError: TypeAlias = Literal["raise", "yield"]
"""What a stream does with a request that failed."""
Put: TypeAlias = Callable[[], list[Ticket]]
"""Queues the requests of a call, on Helmsman's event loop."""


async def gather(requests: GenerateScheduler, tickets: Sequence[Ticket], role: str, num_workers: int) -> list[GenerationResult]:
    """The results of all tickets in their order, on Helmsman's event loop.

    When one fails, the others are withdrawn and get a short grace to end in; then the error is raised as call_all raises it.
    """
    futures = [asyncio.wrap_future(ticket.future) for ticket in tickets]
    if not futures:
        return []
    try:
        first, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            withdraw(requests, tickets)
            await asyncio.wait(pending, timeout=DEFAULT_GRACE_S)
    except asyncio.CancelledError:
        withdraw(requests, tickets)
        raise
    finally:
        for future in futures:
            future.cancel()  # the results of those that have not ended are not needed any more
    failures: dict[str, Exception] = {}
    for future, ticket in sorted(zip(futures, tickets, strict=True), key=lambda pair: pair[0] not in first):
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception):
            failures.setdefault(ticket.sent_to, error)
    if failures:
        # Requests that were never sent fail because of a worker whose own error, if it is here, says more.
        sent = {worker_id: error for worker_id, error in failures.items() if worker_id}
        raise group_error(role, "generate", sent, num_workers) if sent else failures[""]
    return [future.result() for future in futures]


def stream(requests: GenerateScheduler, put: Put, on_error: OnError) -> Iterator[tuple[int, GenerationResult | Exception]]:
    """Put requests when the first item is asked for, and give each with its number as it ends, to a caller that blocks."""
    tickets: list[Ticket] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        run_sync(_put_into(tickets, put, ended.put))
        for _ in tickets:
            number = ended.get()
            yield number, _outcome(tickets[number], on_error)
    finally:
        run_on_loop(lambda: withdraw(requests, tickets))


async def astream(
    requests: GenerateScheduler, put: Put, on_error: OnError
) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
    """As stream, awaited from any event loop."""
    tickets: list[Ticket] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Queue[int]()

    def tell(number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits there
            loop.call_soon_threadsafe(ended.put_nowait, number)

    try:
        await run_async(_put_into(tickets, put, tell))
        for _ in tickets:
            number = await ended.get()
            yield number, _outcome(tickets[number], on_error)
    finally:
        run_on_loop(lambda: withdraw(requests, tickets))


async def _put_into(tickets: list[Ticket], put: Put, tell: Callable[[int], None]) -> None:
    """Put requests, and report the number of each as it ends. The caller knows them once they are put, also when it is
    interrupted before this returns."""
    tickets.extend(put())
    for number, ticket in enumerate(tickets):
        ticket.future.add_done_callback(lambda _, number=number: tell(number))  # type: ignore[misc]


def _outcome(ticket: Ticket, on_error: OnError) -> GenerationResult | Exception:
    error = ticket.future.exception()
    if error is None:
        return ticket.future.result()
    if on_error == "raise" or not isinstance(error, Exception):
        raise error
    return error


def withdraw(requests: GenerateScheduler, tickets: Sequence[Ticket]) -> None:
    """Take back what is queued and abort what is in flight, without waiting for it. On Helmsman's event loop."""
    for ticket in tickets:
        ticket.future.cancel()
    running = [ticket.request_id for ticket in tickets if ticket.future.running()]
    if running:
        what = f"abort of {len(running)} requests that no caller waits for, {running[0]!r} first"
        observe(asyncio.create_task(_abort_if_open(requests, running)), what)


async def _abort_if_open(requests: GenerateScheduler, request_ids: Sequence[str]) -> None:
    with contextlib.suppress(SchedulerClosedError):  # the requests have ended with their workers
        await requests.abort(request_ids)
