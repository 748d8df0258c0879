"""Requests of a rollout role: generate, submit, stream, pause and abort."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import queue
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from helmsman._base.event_loop import run_async, run_on_loop, run_sync
from helmsman.api.errors import RequestsInFlightError, SchedulerClosedError
from helmsman.api.generation import GenerationRequest, GenerationResult, InFlight, SamplingParams
from helmsman.controller._groups.call_all import DEFAULT_GRACE_S, group_error, observe
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.instances import Instances
from helmsman.controller._rollout.request import RequestOptions, Ticket
from helmsman.controller._scheduler.argument_types import refusal, require_integer

T = TypeVar("T")
Prompt: TypeAlias = Sequence[int] | GenerationRequest
"""Token ids, or a GenerationRequest with its own id and sampling parameters."""


class RequestMaker:
    """Makes the requests of one role; their ids begin with its name."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._numbers = itertools.count()

    def make(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        resume_from: GenerationResult | None = None,
        name: str = "the prompt",
    ) -> GenerationRequest:
        """Make one request.

        Raises:
            ValueError: The prompt is invalid, with ``name`` in the message, or ``resume_from``
                cannot be continued.
        """
        if not (sampling is None or isinstance(sampling, SamplingParams)):
            raise refusal("generate", "sampling", sampling, "SamplingParams | None")
        if isinstance(prompt, GenerationRequest):
            if sampling is not None:
                raise ValueError(
                    f"{name} is a GenerationRequest with sampling parameters of its own; omit "
                    "`sampling`"
                )
            request = prompt
        else:
            request = GenerationRequest(
                request_id=f"{self._role}-{next(self._numbers)}",
                prompt_ids=_token_ids(prompt, name),
                sampling=sampling or SamplingParams(),
            )
        if not request.prompt_ids:
            raise ValueError(f"{name} is empty; expected at least one token id")
        if resume_from is not None:
            require_resumable(request, resume_from)
        return request

    def make_all(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        num_samples: int = 1,
    ) -> list[GenerationRequest]:
        """Make the requests of several prompts; the samples of a prompt are neighbours.

        Raises:
            ValueError: A prompt is invalid, or the sampling parameters do not match the prompts.
        """
        each = (
            [sampling] * len(prompts)
            if sampling is None or isinstance(sampling, SamplingParams)
            else list(sampling)
        )
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts; pass one for all, "
                "or one per prompt"
            )
        requests = [
            self.make(p, s, name=f"prompt {i}")
            for i, (p, s) in enumerate(zip(prompts, each, strict=True))
        ]
        return [sample for request in requests for sample in samples_of(request, num_samples)]


def _token_ids(prompt: object, name: str) -> list[int]:
    if isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Iterable):
        raise ValueError(
            f"{name} is of type {type(prompt).__name__}; expected its token ids, or a "
            "GenerationRequest"
        )
    return [int(token) for token in prompt]


def samples_of(request: GenerationRequest, num_samples: int) -> list[GenerationRequest]:
    """Return the samples of a request: itself, or requests ``id#0``, ``id#1``... with other seeds.

    Raises:
        ValueError: ``num_samples`` is below 1.
        TypeError: It is no integer.
    """
    require_integer("generate", "num_samples", num_samples)
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected 1 or more")
    if num_samples == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}#{sample}",
            sampling=msgspec.structs.replace(
                request.sampling, seed=sample_seed(request.sampling.seed, sample)
            ),
        )
        for sample in range(num_samples)
    ]


def sample_seed(seed: int | None, sample: int) -> int | None:
    """Return the seed of a prompt's sample, of 63 bits; None if the prompt has none.

    It does not depend on the number of samples. The first sample has the prompt's own seed, so it
    equals the result of the prompt alone.
    """
    if seed is None or sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=8).digest()) >> 1


def require_resumable(request: GenerationRequest, partial: GenerationResult) -> None:
    """Check that a request can be continued from a partial result.

    Raises:
        ValueError: It cannot, or the result is complete.
    """
    name = f"resume_from, the result of {partial.request_id!r},"
    num_tokens = len(partial.token_ids)
    sampling = request.sampling
    if partial.stop_reason != "abort":
        raise ValueError(
            f"{name} has stop_reason {partial.stop_reason!r}, expected 'abort'; only an aborted "
            "result can be continued"
        )
    if not num_tokens == len(partial.logprobs) == len(partial.versions):
        raise ValueError(
            f"{name} has {num_tokens} tokens, {len(partial.logprobs)} log-probabilities and "
            f"{len(partial.versions)} versions; "
            "expected one of each for every token"
        )
    if num_tokens >= sampling.max_new_tokens:
        raise ValueError(
            f"{name} has {num_tokens} tokens already, and max_new_tokens, which counts them, is "
            f"{sampling.max_new_tokens}; "
            "increase it, or use the result unchanged"
        )
    if num_tokens and partial.token_ids[-1] in sampling.stop_token_ids:
        raise ValueError(f"{name} ends with the stop token {partial.token_ids[-1]} and is complete")


OnError: TypeAlias = Literal["raise", "yield"]
"""A stream raises the error of a failed request, or yields it."""
Put: TypeAlias = Callable[[], list[Ticket]]
"""Queues the requests of a call, on Helmsman's event loop."""


async def gather(
    requests: GenerateScheduler, tickets: Sequence[Ticket], role: str, num_workers: int
) -> list[GenerationResult]:
    """Return the results of all tickets in their order; runs on Helmsman's event loop.

    When one fails, the others are withdrawn and awaited for a short grace. Then a GroupCallError is
    raised or, for a role with one worker, the error itself.
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
            future.cancel()  # Unfinished results are not needed.
    failures: dict[str, Exception] = {}
    for future, ticket in sorted(
        zip(futures, tickets, strict=True), key=lambda pair: pair[0] not in first
    ):
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception):
            failures.setdefault(ticket.sent_to, error)
    if failures:
        # A request that was never sent fails because of a worker's error. If that error is among
        # the failures, it is more specific.
        sent = {worker_id: error for worker_id, error in failures.items() if worker_id}
        raise group_error(role, "generate", sent, num_workers) if sent else failures[""]
    return [future.result() for future in futures]


def stream(
    requests: GenerateScheduler, put: Put, on_error: OnError
) -> Iterator[tuple[int, GenerationResult | Exception]]:
    """Queue requests when the first item is requested, and yield each result as it ends.

    For callers that block.
    """
    tickets: list[Ticket] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        run_sync(_put_into(tickets, put, ended.put))
        for _ in tickets:
            number = ended.get()
            yield number, _outcome(tickets[number], on_error)
    finally:
        run_on_loop(lambda: withdraw(requests, tickets))


async def async_stream(
    requests: GenerateScheduler, put: Put, on_error: OnError
) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
    """Queue requests on first iteration, and yield each result as it ends; for any event loop."""
    tickets: list[Ticket] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Queue[int]()

    def tell(number: int) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed; no coroutine waits on it.
            loop.call_soon_threadsafe(ended.put_nowait, number)

    try:
        await run_async(_put_into(tickets, put, tell))
        for _ in tickets:
            number = await ended.get()
            yield number, _outcome(tickets[number], on_error)
    finally:
        run_on_loop(lambda: withdraw(requests, tickets))


async def _put_into(tickets: list[Ticket], put: Put, tell: Callable[[int], None]) -> None:
    """Queue requests, and report the number of each as it ends.

    ``tickets`` is filled at once, so that a caller that is interrupted can withdraw them.
    """
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
    """Cancel queued requests and abort those in flight, without waiting.

    Runs on Helmsman's event loop.
    """
    for ticket in tickets:
        ticket.future.cancel()
    running = [ticket.request_id for ticket in tickets if ticket.future.running()]
    if running:
        what = f"abort of {len(running)} withdrawn requests, the first of them {running[0]!r}"
        observe(asyncio.create_task(_abort_if_open(requests, running)), what)


async def _abort_if_open(requests: GenerateScheduler, request_ids: Sequence[str]) -> None:
    with contextlib.suppress(SchedulerClosedError):  # Closing has ended the requests.
        await requests.abort(request_ids)


class RolloutRequests:
    """Makes the requests of a role and passes them to its GenerateScheduler.

    Coroutines run on Helmsman's event loop. With ``samples_by_engine``, one call sends all samples
    of a prompt to one instance.
    """

    def __init__(self, instances: Instances, *, samples_by_engine: bool) -> None:
        self._instances, self._samples_by_engine = instances, samples_by_engine
        self.maker = RequestMaker(instances.role)

    # --- generation -------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        options: RequestOptions | None,
        resume_from: GenerationResult | None,
    ) -> Future[GenerationResult]:
        request = self.maker.make(prompt, sampling, resume_from)
        _require_options(options)
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
        waiting = self._instances.requests
        tickets = self._put([request], options, resume_from=resume_from)
        try:
            return await asyncio.wrap_future(tickets[0].future)
        except asyncio.CancelledError:
            withdraw(waiting, tickets)
            raise

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        num_samples: int,
        options: RequestOptions | None = None,
    ) -> list[GenerationResult]:
        """Return the results of requests in their order; see RolloutController.generate."""
        tickets = self._put(requests, options, num_samples)
        instances = self._instances
        return await gather(instances.requests, tickets, instances.role, len(instances.workers))

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        options: RequestOptions | None,
        num_samples: int,
        on_error: OnError,
    ) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Results as they end, for a caller that blocks; see RolloutController.stream."""
        _require_one_of("on_error", on_error, get_args(OnError))
        return stream(
            self._instances.requests, lambda: self._put(requests, options, num_samples), on_error
        )

    def async_stream(
        self,
        requests: Sequence[GenerationRequest],
        options: RequestOptions | None,
        num_samples: int,
        on_error: OnError,
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
        """Results as they end, for any event loop; see RolloutController.async_stream."""
        _require_one_of("on_error", on_error, get_args(OnError))
        return async_stream(
            self._instances.requests, lambda: self._put(requests, options, num_samples), on_error
        )

    def _put(
        self,
        requests: Sequence[GenerationRequest],
        options: RequestOptions | None = None,
        num_samples: int = 1,
        resume_from: GenerationResult | None = None,
    ) -> list[Ticket]:
        _require_options(options)
        self._require_turn("generate")
        kept = {requests[0].request_id: resume_from} if resume_from is not None else {}
        together = num_samples if self._samples_by_engine else 1
        return self._instances.requests.put(requests, options, together=together, kept=kept)

    def _require_turn(self, method: str) -> None:
        if (device_owner := self._instances.device_owner()) is not None:
            device_owner.require(self._instances.role, method)

    # --- control ----------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None) -> int:
        if isinstance(request_ids, str):
            raise ValueError(
                f"request_ids is {request_ids!r}; expected a sequence of ids, such as "
                f"[{request_ids!r}]"
            )
        chosen = None if request_ids is None else frozenset(request_ids)
        for each in chosen or ():
            if not isinstance(each, str):
                raise refusal("abort", "request_ids", each, "Collection[str]")
        return await self._instances.requests.abort(chosen)

    async def pause(self, in_flight: InFlight, timeout: float | None, by: str = "") -> None:
        """Stop sending requests until ``resume``, as RolloutController.pause does.

        ``by`` names the holder of the pause; only a resume with the same name ends it. A weight
        update pauses under its own name.
        """
        _require_one_of("in_flight", in_flight, get_args(InFlight))
        requests = self._instances.requests
        requests.suspend(by)
        operation = (
            f"an update of the weights with in_flight={in_flight!r}"
            if by
            else f"pause(in_flight={in_flight!r})"
        )
        if in_flight != "keep":
            ended = requests.wait_ended() if in_flight == "wait" else requests.take_back()
            await self.within(ended, operation, timeout, resumes=bool(by))

    async def resume(self) -> None:
        self._instances.requests.resume()

    async def wait_idle(self, timeout: float | None) -> None:
        await self.within(self._instances.requests.wait_idle(), "wait_idle", timeout)

    async def within(
        self,
        wait: Coroutine[Any, Any, T],
        operation: str,
        limit_s: float | None,
        *,
        resumes: bool = False,
        at: Collection[str] | None = None,
    ) -> T:
        """Await the ends of requests for an operation, within a limit.

        Args:
            wait: Waits for the ends.
            operation: Name of the operation, for the error.
            limit_s: Limit in seconds.
            resumes: Whether requests are sent again after an error of the operation.
            at: Instances whose requests are awaited; all when None.

        Returns:
            The result of ``wait``.

        Raises:
            RequestsInFlightError: Requests did not end within ``limit_s``.
        """
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await wait
        except TimeoutError as error:  # It may be a time-out of the call itself.
            if not limit.expired() or limit_s is None:
                raise
            requests = self._instances.requests
            raise RequestsInFlightError(
                role=self._instances.role,
                operation=operation,
                in_flight={
                    i.instance_id: i.num_in_flight
                    for i in requests.instances.values()
                    if i.num_in_flight and (at is None or i.instance_id in at)
                },
                num_queued=requests.num_queued,
                paused=requests.is_suspended and not resumes,
                limit_s=limit_s,
            ) from error


def _require_options(options: object) -> None:
    if not (options is None or isinstance(options, RequestOptions)):
        raise refusal("generate", "options", options, "RequestOptions | None")


def _require_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
