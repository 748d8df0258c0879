"""What a script asks of a role's rollout workers: prompts to continue, and a hold over the requests that do so."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, get_args, overload

from helmsman.api.errors import RequestsInFlightError
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._generation.request import RequestOptions, Ticket
from helmsman.controller._generation.request_factory import Prompt, RequestMaker, require_resumable, samples_of
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._generation.streaming import OnError, astream, gather, stream, withdraw
from helmsman.controller._roles.handoff_protocol import Turn
from helmsman.controller._roles.role_controller import RoleController
from helmsman.controller._validation.argument_types import checked

InFlight: TypeAlias = Literal["continue", "finish", "recall"]
"""What becomes of the requests that workers have, when nothing more is to start; see RolloutRequests.pause."""


class RolloutRequests(RoleController):
    """The requests of a RolloutController, whose workers are their own room's.

    Methods whose names begin with ``a`` are awaited, from any event loop; the others block.
    """

    turn: Turn | None
    _maker: RequestMaker
    _samples_by_engine: bool

    @abc.abstractmethod
    def _queue(self) -> GenerateScheduler:
        """Where the requests are. Raises: HelmsmanError unless the controller is started."""

    # --- generation -------------------------------------------------------------------------------------------------

    @checked
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_samples: int = 1,
    ) -> list[GenerationResult]:
        """Continue all prompts and return the results in their order, those of each prompt's samples in a row.

        Args:
            sampling: for all prompts, or one for each; the defaults when None.
            num_samples: of each prompt. With more than one, the k-th sample of the request ``id`` is the request ``id#k``. It
                has a seed of its own that follows from the prompt's, and none when that has none.
        Raises: ValueError for prompts that make no sense, before anything is sent. When a request fails, the others of this
            call are aborted and their ends awaited for a short grace; then the error is raised as call_all raises it. Use
            submit, agenerate or stream to keep the results of the others.
        """
        return run_sync(self._generate(self._maker.make_all(prompts, sampling, num_samples), num_samples))

    @checked
    async def agenerate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> GenerationResult:
        """Continue one prompt. A request is withdrawn, or aborted once it is in flight, when the await is cancelled.

        Args:
            resume_from: a result of this prompt that ended with stop_reason 'abort'. The request goes on after its tokens, on
                any worker, and the result has all of them, each with its log-probability and version; ``max_new_tokens`` counts
                them, too. With the same seed and weights it is, up to rounding, what it would have been without the abort.
        Raises: ValueError for a prompt that makes no sense, or a ``resume_from`` that has nothing to go on to.
        """
        request = self._make(prompt, sampling, resume_from)
        return await run_async(self._generate_one(request, options, resume_from))

    @checked
    async def agenerate_samples(
        self,
        prompt: Prompt,
        num_samples: int,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt several times; see generate for their ids and seeds.

        When a sample fails, or the await is cancelled, the others are withdrawn or aborted. Raises: as generate.
        """
        requests = samples_of(self._maker.make(prompt, sampling), num_samples)
        return await run_async(self._generate(requests, num_samples, options))

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: Literal["raise"] = ...,
    ) -> Iterator[tuple[int, GenerationResult]]: ...

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: OnError,
    ) -> Iterator[tuple[int, GenerationResult | Exception]]: ...

    @checked
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Continue all prompts and give ``(index, result)`` of each as it ends; ``index`` is its place in what generate would
        return, so ``index // num_samples`` is the prompt's.

        Requests are sent when the first item is asked for. Whoever leaves the loop early, in whatever way, withdraws the rest,
        which is aborted at its workers. With ``samples_by_engine`` the samples that one call draws come together.

        Args:
            on_error: ``raise`` the first failure, which ends the stream, or ``yield`` each as ``(index, error)``.
        Raises: ValueError for prompts that make no sense, at once.
        """
        _require_one_of("on_error", on_error, get_args(OnError))
        requests = self._maker.make_all(prompts, sampling, num_samples)
        return stream(self._queue(), lambda: self._put(requests, options, num_samples), on_error)

    @overload
    def astream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncIterator[tuple[int, GenerationResult]]: ...

    @overload
    def astream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: OnError,
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]: ...

    @checked
    def astream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
        on_error: OnError = "raise",
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
        """As stream, for ``async for``. A ``break`` withdraws the rest when the loop lets go of the iterator;
        ``contextlib.aclosing`` does so at a certain place."""
        _require_one_of("on_error", on_error, get_args(OnError))
        requests = self._maker.make_all(prompts, sampling, num_samples)
        return astream(self._queue(), lambda: self._put(requests, options, num_samples), on_error)

    @checked
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> Future[GenerationResult]:
        """Queue one prompt and return its future; blocks while ``max_queue`` submitted requests wait.

        The future can be cancelled while the request waits; abort ends one that is in flight. Its callbacks run on Helmsman's
        event loop.

        Args:
            resume_from: as in agenerate.
        """
        return run_sync(self._submit(self._make(prompt, sampling, resume_from), options, resume_from))

    @checked
    async def asubmit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> Future[GenerationResult]:
        """As submit, awaited."""
        return await run_async(self._submit(self._make(prompt, sampling, resume_from), options, resume_from))

    def _make(self, prompt: Prompt, sampling: SamplingParams | None, resume_from: GenerationResult | None) -> GenerationRequest:
        request = self._maker.make(prompt, sampling)
        if resume_from is not None:
            require_resumable(request, resume_from)
        return request

    # --- control ----------------------------------------------------------------------------------------------------

    @checked
    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all that are here now) early; each returns what it has with stop_reason 'abort'.

        What waits has ended when this returns; what is in flight ends as soon as its worker has given it back, see wait_idle.
        Requests that come meanwhile are not meant: to be rid of all, pause first.

        Returns: how many. Raises: ValueError for one id that is not in a sequence.
        """
        return run_sync(self._abort(request_ids))

    @checked
    async def aabort(self, request_ids: Collection[str] | None = None) -> int:
        """As abort, awaited."""
        return await run_async(self._abort(request_ids))

    @checked
    def pause(self, in_flight: InFlight = "continue", timeout: float | None = None) -> None:
        """Give no request to a worker from now on until resume; submission stays open.

        Args:
            in_flight: what becomes of the requests that workers have. They ``continue``, and this returns at once; or they
                ``finish``, and it returns when they have; or it ``recall``s them, and returns when their workers have given
                them back with the tokens that they have, with which they wait and go on anywhere after resume. One that comes
                to its end on the way is done. The keys of recalled tokens are computed anew, by the weights of then.
            timeout: seconds to wait for that; None waits as long as the workers' calls may take (``request_timeout_s``).
        Raises: RequestsInFlightError after the time-out, which names the workers that still have requests. It is paused then,
            too, and what was recalled still comes back when its worker answers; when that dies, its requests go by ``retries``.
        """
        run_sync(self._pause(in_flight, timeout))

    @checked
    async def apause(self, in_flight: InFlight = "continue", timeout: float | None = None) -> None:
        """As pause, awaited."""
        await run_async(self._pause(in_flight, timeout))

    def resume(self) -> None:
        """Send queued requests again, as soon as no update of the weights holds them either."""
        run_sync(self._resume())

    async def aresume(self) -> None:
        """As resume, awaited."""
        await run_async(self._resume())

    @checked
    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until no worker has a request and, unless paused, none waits: what comes meanwhile is waited for, too. While
        others submit, it holds for a moment only; after pause it holds until resume.

        Args:
            timeout: seconds; None for no limit.
        Raises: RequestsInFlightError after the time-out.
        """
        run_sync(self._wait_idle(timeout))

    @checked
    async def await_idle(self, timeout: float | None = None) -> None:
        """As wait_idle, awaited."""
        await run_async(self._wait_idle(timeout))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _put(
        self,
        requests: Sequence[GenerationRequest],
        options: RequestOptions | None = None,
        num_samples: int = 1,
        resume_from: GenerationResult | None = None,
    ) -> list[Ticket]:
        if self.turn is not None:
            self.turn.require(self.role, "agenerate")
        kept = {requests[0].request_id: resume_from} if resume_from is not None else {}
        together = num_samples if self._samples_by_engine else 1
        return self._queue().put(requests, options, together=together, kept=kept)

    async def _submit(
        self, request: GenerationRequest, options: RequestOptions | None, resume_from: GenerationResult | None
    ) -> Future[GenerationResult]:
        if self.turn is not None:
            self.turn.require(self.role, "submit")
        kept = {request.request_id: resume_from} if resume_from is not None else {}
        return (await self._queue().submit(request, options, kept=kept)).future

    async def _generate_one(
        self, request: GenerationRequest, options: RequestOptions | None, resume_from: GenerationResult | None
    ) -> GenerationResult:
        queue, tickets = self._queue(), self._put([request], options, resume_from=resume_from)
        try:
            return await asyncio.wrap_future(tickets[0].future)
        except asyncio.CancelledError:
            withdraw(queue, tickets)
            raise

    async def _generate(
        self, requests: Sequence[GenerationRequest], num_samples: int, options: RequestOptions | None = None
    ) -> list[GenerationResult]:
        tickets = self._put(requests, options, num_samples)
        return await gather(self._queue(), tickets, self.role, len(self.workers))

    async def _abort(self, request_ids: Collection[str] | None) -> int:
        require_ids("request_ids", request_ids)
        return await self._queue().abort(None if request_ids is None else frozenset(request_ids))

    async def _pause(self, in_flight: InFlight = "continue", timeout: float | None = None, by: str = "") -> None:
        """As pause. Who pauses by a name of its own is not undone by others' resume, nor undoes their pause by its own: an
        update of the weights does so, and resumes in any case."""
        _require_one_of("in_flight", in_flight, get_args(InFlight))
        requests = self._queue()
        requests.suspend(by)
        operation = f"an update of the weights with in_flight={in_flight!r}" if by else f"pause(in_flight={in_flight!r})"
        if in_flight == "finish":
            await self._within(requests.wait_ended(), operation, timeout, resumes=bool(by))
        elif in_flight == "recall":
            await self._within(requests.take_back(), operation, timeout, resumes=bool(by))

    async def _resume(self) -> None:
        self._queue().resume()

    async def _wait_idle(self, timeout: float | None) -> None:
        await self._within(self._queue().wait_idle(), "wait_idle", timeout)

    async def _within(
        self, wait: Coroutine[Any, Any, None], operation: str, limit_s: float | None, *, resumes: bool = False
    ) -> None:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await wait
        except TimeoutError as error:  # which a call's own is, too
            if not limit.expired() or limit_s is None:
                raise
            requests = self._queue()
            raise RequestsInFlightError(
                role=self.role,
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
