"""A backend whose calls the test ends, and helpers that run tests on a virtual clock."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ParamSpec

from helmsman.api.errors import InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams, StopReason
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.request import RequestOptions, RequestState, Ticket
from helmsman.testing import run_virtually

P = ParamSpec("P")

NEVER_S = 1e6
"""Virtual seconds after which a test that still waits fails."""


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a virtual clock, where a test that would wait forever fails at once."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(NEVER_S):
                await test(*args, **kwargs)

        run_virtually(bounded())

    return run


async def settle() -> None:
    """Run all callbacks that are ready; the virtual clock advances only after them."""
    await asyncio.sleep(1e-6)


async def waits(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start a task and check that it waits."""
    task = asyncio.ensure_future(work)
    await settle()
    assert not task.done()
    return task  # type: ignore[return-value]


def make_request(
    request_id: str, prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 8
) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerationRequest(request_id=request_id, prompt_ids=list(prompt), sampling=sampling)


def make_requests(num: int, **options: Any) -> list[GenerationRequest]:
    return [make_request(f"r{index}", **options) for index in range(num)]


def make_ticket(request: GenerationRequest | None = None, **options: Any) -> Ticket:
    return Ticket(request or make_request("r"), RequestOptions(**options))


def make_result(
    request_id: str,
    tokens: Sequence[int] = (7,),
    version: int = 0,
    stop_reason: StopReason = "stop",
) -> GenerationResult:
    """Return a result; each token has its own log-probability, and each attempt its version."""
    return GenerationResult(
        request_id=request_id,
        token_ids=list(tokens),
        logprobs=[-token / 100 for token in tokens],
        versions=[version] * len(tokens),
        stop_reason=stop_reason,
    )


class Call:
    """A request in flight, which the test ends."""

    def __init__(self, instance_id: str, request: GenerationRequest) -> None:
        self.instance_id, self.request = instance_id, request
        self.answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def end(
        self, tokens: Sequence[int] = (7,), version: int = 0, stop_reason: StopReason = "stop"
    ) -> None:
        self.answer.set_result(make_result(self.request_id, tokens, version, stop_reason))

    def give_back(self, tokens: Sequence[int] = (), version: int = 0) -> None:
        """End the request like an instance that aborts it."""
        self.end(tokens, version, "abort")

    def lose(self, *, may_have_begun: bool = True) -> None:
        self.answer.set_exception(
            InstanceLostError(
                instance_id=self.instance_id,
                reason="its node was lost",
                may_have_begun=may_have_begun,
            )
        )


class HeldBackend:
    """A backend whose calls end only when the test ends them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """All calls, in the order in which they were sent."""
        self.together: list[tuple[str, list[str]]] = []
        """Instance and request ids of each call of generate_samples."""
        self.aborts: list[tuple[str, list[str]]] = []
        self.abort_error: Exception | None = None
        self.abort_gate = asyncio.Event()
        """Blocks aborts while it is clear."""
        self.abort_gate.set()

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        call = Call(instance_id, request)
        self.calls.append(call)
        return await call.answer

    async def generate_samples(
        self, instance_id: str, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationResult]:
        calls = [Call(instance_id, request) for request in requests]
        self.calls += calls
        self.together.append((instance_id, [call.request_id for call in calls]))
        return await asyncio.gather(*(call.answer for call in calls))

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        self.aborts.append((instance_id, list(request_ids)))
        await self.abort_gate.wait()
        if self.abort_error is not None:
            raise self.abort_error

    def open(self, instance_id: str | None = None) -> list[Call]:
        """Return the open calls of one instance, or of all."""
        return [
            call
            for call in self.calls
            if not call.answer.done() and instance_id in (None, call.instance_id)
        ]

    def last(self, request_id: str) -> Call:
        return next(call for call in reversed(self.calls) if call.request_id == request_id)

    async def end(self, request_id: str, *args: Any, **options: Any) -> None:
        """End the last call of a request by Call.end, and settle."""
        self.last(request_id).end(*args, **options)
        await settle()

    async def give_back(self, request_id: str, *args: Any, **options: Any) -> None:
        """End the last call of a request by Call.give_back, and settle."""
        self.last(request_id).give_back(*args, **options)
        await settle()

    async def lose(self, request_id: str, **options: Any) -> None:
        """End the last call of a request by Call.lose, and settle."""
        self.last(request_id).lose(**options)
        await settle()

    async def end_all(
        self, instance_id: str | None = None, tokens: Sequence[int] = (7,), version: int = 0
    ) -> None:
        """End the open calls of one instance, or of all, and settle."""
        for call in self.open(instance_id):
            call.end(tokens, version)
        await settle()

    @property
    def sent(self) -> list[str]:
        """Request ids of all calls, in the order in which they were sent."""
        return [call.request_id for call in self.calls]


def make_scheduler(
    capacities: Sequence[int], backend: HeldBackend | None = None, **options: Any
) -> tuple[HeldBackend, GenerateScheduler]:
    """Return a backend and a scheduler with instances i0, i1... of these capacities."""
    backend = backend or HeldBackend()
    scheduler = GenerateScheduler(backend, **options)
    for index, capacity in enumerate(capacities):
        scheduler.add(f"i{index}", capacity)
    return backend, scheduler


async def put(scheduler: GenerateScheduler, *args: Any, **options: Any) -> list[Ticket]:
    """Put requests, and settle, so that the scheduler sends them."""
    tickets = scheduler.put(*args, **options)
    await settle()
    return tickets


def states(tickets: Sequence[Ticket]) -> list[RequestState]:
    return [ticket.state for ticket in tickets]


def assert_empty(scheduler: GenerateScheduler) -> None:
    assert (scheduler.num_queued, scheduler.num_in_flight, scheduler.running()) == (0, 0, {})
    for instance in scheduler.instances.values():
        assert (instance.num_in_flight, instance.outstanding_tokens) == (0, 0)
