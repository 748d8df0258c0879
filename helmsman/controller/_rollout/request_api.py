"""RolloutRequests: the prompts of a script as requests of a role, their results, and the hold over their flow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, get_args

from helmsman.api.errors import RequestsInFlightError
from helmsman.api.generation import GenerationRequest, GenerationResult, InFlight, SamplingParams
from helmsman.controller._generation.request import RequestOptions, Ticket
from helmsman.controller._generation.request_factory import Prompt, RequestMaker
from helmsman.controller._generation.streaming import OnError, astream, gather, stream, withdraw
from helmsman.controller._rollout.instances import Instances


class RolloutRequests:
    """Makes the requests of a role and gives them to its GenerateScheduler. Coroutines run on Helmsman's event loop.

    Args:
        instances: the role's instances.
        samples_by_engine: whether a prompt's samples go to one instance by one call.
    """

    def __init__(self, instances: Instances, *, samples_by_engine: bool) -> None:
        self._instances, self._samples_by_engine = instances, samples_by_engine
        self.maker = RequestMaker(instances.role)

    # --- generation -------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        options: RequestOptions | None,
        resume_from: GenerationResult | None,
    ) -> Future[GenerationResult]:
        request = self.maker.make(prompt, sampling, resume_from)
        self._require_turn("submit")
        kept = {request.request_id: resume_from} if resume_from is not None else {}
        return (await self._instances.requests.submit(request, options, kept=kept)).future

    async def generate_one(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        options: RequestOptions | None,
        resume_from: GenerationResult | None,
    ) -> GenerationResult:
        request = self.maker.make(prompt, sampling, resume_from)
        queue, tickets = self._instances.requests, self._put([request], options, resume_from=resume_from)
        try:
            return await asyncio.wrap_future(tickets[0].future)
        except asyncio.CancelledError:
            withdraw(queue, tickets)
            raise

    async def generate(
        self, requests: Sequence[GenerationRequest], num_samples: int, options: RequestOptions | None = None
    ) -> list[GenerationResult]:
        """The results of requests in their order; see RolloutController.generate."""
        tickets = self._put(requests, options, num_samples)
        instances = self._instances
        return await gather(instances.requests, tickets, instances.role, len(instances.workers))

    def stream(
        self, requests: Sequence[GenerationRequest], options: RequestOptions | None, num_samples: int, on_error: OnError
    ) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Results as they end, for a caller that blocks; see RolloutController.stream."""
        _require_one_of("on_error", on_error, get_args(OnError))
        return stream(self._instances.requests, lambda: self._put(requests, options, num_samples), on_error)

    def astream(
        self, requests: Sequence[GenerationRequest], options: RequestOptions | None, num_samples: int, on_error: OnError
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
        """Results as they end, for any event loop; see RolloutController.astream."""
        _require_one_of("on_error", on_error, get_args(OnError))
        return astream(self._instances.requests, lambda: self._put(requests, options, num_samples), on_error)

    def _put(
        self,
        requests: Sequence[GenerationRequest],
        options: RequestOptions | None = None,
        num_samples: int = 1,
        resume_from: GenerationResult | None = None,
    ) -> list[Ticket]:
        self._require_turn("agenerate")
        kept = {requests[0].request_id: resume_from} if resume_from is not None else {}
        together = num_samples if self._samples_by_engine else 1
        return self._instances.requests.put(requests, options, together=together, kept=kept)

    def _require_turn(self, method: str) -> None:
        if (turn := self._instances.turn()) is not None:
            turn.require(self._instances.role, method)

    # --- control ----------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None) -> int:
        require_ids("request_ids", request_ids)
        return await self._instances.requests.abort(None if request_ids is None else frozenset(request_ids))

    async def pause(self, in_flight: InFlight, timeout: float | None, by: str = "") -> None:
        """See RolloutController.pause.

        Args:
            by: name of a holder, whose pause only its own resume ends: an update of the weights, which resumes in any case.
        """
        _require_one_of("in_flight", in_flight, get_args(InFlight))
        requests = self._instances.requests
        requests.suspend(by)
        operation = f"an update of the weights with in_flight={in_flight!r}" if by else f"pause(in_flight={in_flight!r})"
        if in_flight != "continue":
            ended = requests.wait_ended() if in_flight == "finish" else requests.take_back()
            await self.within(ended, operation, timeout, resumes=bool(by))

    async def resume(self) -> None:
        self._instances.requests.resume()

    async def wait_idle(self, timeout: float | None) -> None:
        await self.within(self._instances.requests.wait_idle(), "wait_idle", timeout)

    async def within(
        self, wait: Coroutine[Any, Any, None], operation: str, limit_s: float | None, *, resumes: bool = False
    ) -> None:
        """Await what becomes of requests.

        Args:
            operation: that waits, for the error.
            limit_s: seconds; None for no limit.
            resumes: whether the flow goes on after an error.
        Raises: RequestsInFlightError after the limit.
        """
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await wait
        except TimeoutError as error:  # which a call's own is, too
            if not limit.expired() or limit_s is None:
                raise
            requests = self._instances.requests
            raise RequestsInFlightError(
                role=self._instances.role,
                operation=operation,
                in_flight={i.instance_id: i.num_in_flight for i in requests.instances.values() if i.num_in_flight},
                num_queued=requests.num_queued,
                paused=requests.is_suspended and not resumes,
                limit_s=limit_s,
            ) from error


def require_ids(name: str, ids: Collection[str] | None) -> None:
    """Raises: ValueError for one id in place of several, whose letters would be taken for ids."""
    if isinstance(ids, str):
        raise ValueError(f"{name} is {ids!r}; expected a sequence of ids, such as [{ids!r}]")


def _require_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
