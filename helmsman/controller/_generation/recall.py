"""Aborts and recalls of running requests at their instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from helmsman.api.errors import InstanceLostError
from helmsman.controller._generation.request import Instance, Ticket
from helmsman.controller._generation.request_lifecycle import RequestFlow


async def recall_running(flow: RequestFlow, instances: Iterable[Instance]) -> None:
    """Abort the running requests of these instances, to be queued again when they return."""
    running: dict[Instance, list[Ticket]] = {}
    for instance in instances:
        for ticket in instance.tickets:
            if ticket.is_running:
                ticket.is_recalled = True
                running.setdefault(instance, []).append(ticket)
    await abort_running(flow, running)


async def abort_running(flow: RequestFlow, running: Mapping[Instance, Sequence[Ticket]]) -> None:
    """Abort these requests at their instances; ignore lost ones, whose loss ends requests."""
    outcomes = await asyncio.gather(
        *(_abort_at(flow, *each) for each in running.items()), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, InstanceLostError):
            raise outcome


async def _abort_at(flow: RequestFlow, instance: Instance, tickets: Sequence[Ticket]) -> None:
    """Abort requests at an instance; return when it replies or has none of them left.

    The second condition is for a dead instance, which may never reply.
    """
    call = flow.abort_at(instance, tickets)
    left = asyncio.ensure_future(
        flow.until(lambda: all(ticket.instance is not instance for ticket in tickets))
    )
    try:
        await asyncio.wait([call, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
    if call.done():
        call.result()


def have_ended(tickets: Iterable[Ticket]) -> Callable[[], bool]:
    """Return a predicate: whether the attempts of these tickets that run now have ended.

    It is polled often, so all its calls together look at each ticket about once.
    """
    attempts = [(ticket, ticket.num_attempts) for ticket in tickets if ticket.is_running]

    def ended() -> bool:
        while attempts and not (
            attempts[-1][0].is_running and attempts[-1][0].num_attempts == attempts[-1][1]
        ):
            attempts.pop()
        return not attempts

    return ended
