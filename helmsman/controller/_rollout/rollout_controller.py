"""RolloutController: prompts go to the least loaded of a role's workers and come back in the
caller's order.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

from helmsman.api.closing import Starting
from helmsman.api.generation import GenerationResult, InFlight, SamplingParams
from helmsman.api.scheduler import Job, ResultHandle, Scheduler, Worker, ids_of
from helmsman.api.weights import Weights
from helmsman.controller._aio.event_loop import run_async
from helmsman.controller._generation.health import SupervisionPolicy
from helmsman.controller._generation.request import RequestOptions, RolloutStats
from helmsman.controller._generation.retries import RetryPolicy
from helmsman.controller._generation.routing import RoutingPolicy
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._roles.role_controller import DeviceOwner, blocking
from helmsman.controller._rollout.instance_pool import InstancePool
from helmsman.controller._rollout.instances import Instances
from helmsman.controller._rollout.request_api import OnError, Prompt, RolloutRequests, samples_of
from helmsman.controller._rollout.weight_state import RolloutWeights
from helmsman.controller._validation.argument_types import checked


class RolloutController(Starting):
    """The rollout instances of one role.

    A request ends exactly once. When its worker dies, it fails with WorkerFailedError or, with
    ``retries=RetryGeneration()``, goes on at another; the dead worker takes no more, and when none
    is left every request fails. Instances come and go while requests run (``add``, ``drain``,
    ``remove``, ``scale``). Each operation ``x`` blocks; ``async_x`` is awaited, from any event
    loop, with the same arguments and result.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        engine_name: str | None = None,
        *,
        max_in_flight_per_worker: int = 64,
        max_queue: int = 1024,
        max_in_flight: int | None = None,
        request_timeout: float | None = None,
        policy: RoutingPolicy | None = None,
        retries: RetryPolicy | None = None,
        supervision: SupervisionPolicy | None = None,
        samples_by_engine: bool = False,
    ) -> None:
        """Describe the role; nothing starts yet.

        Args:
            engine: import path 'package.module.Class', or a class.
            job: role, replicas and what each worker needs.
            engine_args, engine_kwargs: for the engine's constructor, the same on every worker.
            engine_name: its name in each worker; the worker's id when None.
            max_in_flight_per_worker: requests that a worker has at most; the rest waits here.
            max_queue: requests given to submit that wait here at most; submit blocks beyond it.
            max_in_flight: requests that all workers together have at most.
            policy: which worker takes a request; LeastOutstandingTokens when None.
            retries: which requests go on at another worker when theirs dies; RetryUnbegun, those
                that it had not begun, when None.
            supervision: probe the workers, and rebuild dead ones, which serve again once they have
                the weights of the last update (kept for that until the next one). Workers that are
                about to go (Scheduler.preemption_notices) are left in time: what they have is
                continued elsewhere, and they are rebuilt where there is room. With None a worker's
                death is noticed by its calls, and final.
            samples_by_engine: give a prompt's samples to one worker by one call of its engine's
                ``agenerate_samples``, which computes the prompt once, when it has room for all of
                them. Otherwise each is a request of its own and goes where there is room.
            request_timeout: seconds from sending a request to its result; the scheduler's
                ``timeouts.call_s`` when None.
        """
        self.scheduler, self.job, self.engine_name = scheduler, job, engine_name
        self.device_owner: DeviceOwner | None = (
            None  # whose devices these are, where a trainer takes turns with it
        )
        self._instances = Instances(
            *(scheduler, engine, job, engine_args, engine_kwargs, engine_name),
            *(max_in_flight_per_worker, request_timeout, retries, supervision),
            make_queue=functools.partial(
                GenerateScheduler,
                policy=policy,
                retries=retries,
                max_in_flight=max_in_flight,
                max_queue=max_queue,
            ),
            why_hopeless=lambda: self.weight_sink.why_hopeless(),
            device_owner=lambda: self.device_owner,
            rebuild=lambda worker_id: self._pool.rebuild(worker_id),
            on_closed=lambda: self.weight_sink.forget(),
        )
        self._requests = RolloutRequests(self._instances, samples_by_engine=samples_by_engine)
        self.weight_sink = RolloutWeights(self._instances, self._requests)
        """Its end of a weight sync."""
        self._pool = InstancePool(self._instances, self.weight_sink)

    @property
    def role(self) -> str:
        """Name of the role."""
        return self.job.role

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The role's workers in rank order; raises unless the controller is started."""
        return self._instances.workers

    @property
    def is_started(self) -> bool:
        return self._instances.is_started

    def initialize(self) -> None:
        """Start the workers and build their engines. Idempotent.

        On an error nothing of the role remains. It runs in the caller's thread, so that an
        interrupt reaches the scheduler's own start.

        Raises:
            JobError: The job is invalid.
            StartError: The workers could not start.
            Exception: The root cause of a failure on the workers, as from ``generate``.
        """
        self._instances.initialize()

    def close(self) -> None:
        """Destroy the engines and end the workers. Idempotent; nothing happens when the scheduler
        has been closed before.

        Raises: ShutdownIncompleteError.
        """
        self._instances.close()

    async def async_stats(self) -> RolloutStats:
        """Queued requests, requests in flight, and the state of each worker."""
        return await run_async(self._instances.stats())

    stats = blocking(async_stats)

    # --- generation -------------------------------------------------------------------------------

    @checked
    async def async_generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
    ) -> list[GenerationResult]:
        """Continue all prompts and return the results in their order.

        The samples of a prompt are neighbours. When a request fails, the others of this call are
        aborted, and their ends are awaited for a short grace. Use ``submit``, ``generate_one`` or
        ``stream`` to keep the results of the others.

        Args:
            prompts: Token ids of each prompt, or GenerationRequests.
            sampling: For all prompts, or one for each; the defaults when None.
            options: Priority, session and such of all requests.
            num_samples: Samples of each prompt. The k-th sample of the request ``id`` is the
                request ``id#k``. Its seed follows from the prompt's; it has none when that has
                none.

        Returns:
            ``len(prompts) * num_samples`` results.

        Raises:
            ValueError: A prompt is invalid; nothing was sent.
            WorkerFailedError: The only failed request lost its worker.
            GroupCallError: Requests failed at several workers; the root cause comes first.
        """
        requests = self._requests.maker.make_all(prompts, sampling, num_samples)
        return await run_async(self._requests.generate(requests, num_samples, options))

    generate = blocking(async_generate)

    @checked
    async def async_generate_one(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> GenerationResult:
        """Continue one prompt.

        Cancelling the await withdraws a queued request and aborts one that is in flight.

        Args:
            prompt: Token ids, or a GenerationRequest.
            sampling: The defaults when None.
            options: Priority, session and such of the request.
            resume_from: A result of this prompt with stop_reason 'abort'. The request continues
                after its tokens, on any worker. The result has all tokens, each with its
                log-probability and version, and ``max_new_tokens`` counts all of them. With the
                same seed and weights the result equals, up to rounding, that without the abort.

        Raises:
            ValueError: The prompt is invalid, or ``resume_from`` cannot be continued.
            WorkerFailedError: The worker died, and ``retries`` did not allow another attempt.
        """
        return await run_async(self._requests.generate_one(prompt, sampling, options, resume_from))

    generate_one = blocking(async_generate_one)

    @checked
    async def async_generate_samples(
        self,
        prompt: Prompt,
        num_samples: int,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt several times; ids and seeds are those of ``generate``.

        When a sample fails, or the await is cancelled, the others are withdrawn or aborted.

        Args:
            prompt: Token ids, or a GenerationRequest.
            num_samples: How many results to return.
            sampling: The defaults when None.
            options: Priority, session and such of the requests.

        Raises:
            ValueError: The prompt or ``num_samples`` is invalid; nothing was sent.
            WorkerFailedError: The only failed request lost its worker.
            GroupCallError: Requests failed at several workers; the root cause comes first.
        """
        requests = samples_of(self._requests.maker.make(prompt, sampling), num_samples)
        return await run_async(self._requests.generate(requests, num_samples, options))

    generate_samples = blocking(async_generate_samples)

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
        """Continue all prompts and give ``(index, result)`` of each as it ends; ``index`` is its
        place in what generate would return, so ``index // num_samples`` is the prompt's.

        Requests are sent when the first item is asked for. Leaving the loop early, also by an
        error, aborts the remaining requests. With ``samples_by_engine`` the samples that one call
        draws come together.

        Args:
            on_error: ``raise`` the first failure, which ends the stream, or ``yield`` each as
                ``(index, error)``.
        Raises: ValueError for prompts that make no sense, at once.
        """
        requests = self._requests.maker.make_all(prompts, sampling, num_samples)
        return self._requests.stream(requests, options, num_samples, on_error)

    @overload
    def async_stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncIterator[tuple[int, GenerationResult]]: ...

    @overload
    def async_stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        options: RequestOptions | None = ...,
        *,
        num_samples: int = ...,
        on_error: OnError,
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]: ...

    @checked
    def async_stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
        on_error: OnError = "raise",
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
        """As stream, for ``async for``. A ``break`` aborts the rest when the loop drops the
        iterator; ``contextlib.aclosing`` does so at a certain place.
        """
        requests = self._requests.maker.make_all(prompts, sampling, num_samples)
        return self._requests.async_stream(requests, options, num_samples, on_error)

    @checked
    async def async_submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> Future[GenerationResult]:
        """Queue one prompt and return its future; blocks while ``max_queue`` submitted requests
        wait.

        The future can be cancelled while the request waits; abort ends one that is in flight. Its
        callbacks run on Helmsman's event loop.

        Args:
            resume_from: as in generate_one.
        """
        return await run_async(self._requests.submit(prompt, sampling, options, resume_from))

    submit = blocking(async_submit)

    # --- flow of requests -------------------------------------------------------------------------

    @checked
    async def async_abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all that are here now) early; each returns what it has with
        stop_reason 'abort'.

        What waits has ended when this returns; what is in flight ends as soon as its worker has
        given it back, see wait_idle. Requests that come meanwhile are not meant: to be rid of all,
        pause first.

        Returns: how many. Raises: ValueError for one id that is not in a sequence.
        """
        return await run_async(self._requests.abort(request_ids))

    abort = blocking(async_abort)

    @checked
    async def async_pause(self, in_flight: InFlight = "keep", timeout: float | None = None) -> None:
        """Give no request to a worker from now on until resume; submission stays open.

        Args:
            in_flight: what becomes of the requests that workers have. They ``continue``, and this
                returns at once; or they ``finish``, and it returns when they have; or it
                ``recall``s them, and returns when their workers have given them back with the
                tokens that they have, with which they wait and go on anywhere after resume. One
                that comes to its end on the way is done. The keys of recalled tokens are computed
                again, by the weights at that time.
            timeout: seconds to wait for that; None waits as long as the workers' calls may take
                (``request_timeout``).
        Raises: RequestsInFlightError after the time-out, which names the workers that still have
            requests. It is paused then, too, and what was recalled still comes back when its worker
            answers; when that dies, its requests go by ``retries``.
        """
        await run_async(self._requests.pause(in_flight, timeout))

    pause = blocking(async_pause)

    async def async_resume(self) -> None:
        """Send queued requests again, as soon as no update of the weights holds them either."""
        await run_async(self._requests.resume())

    resume = blocking(async_resume)

    @checked
    async def async_wait_idle(self, timeout: float | None = None) -> None:
        """Wait until no worker has a request and, unless paused, none waits: what comes meanwhile
        is waited for, too. While others submit, it holds for a moment only; after pause it holds
        until resume.

        Args:
            timeout: seconds; None for no limit.
        Raises: RequestsInFlightError after the time-out.
        """
        await run_async(self._requests.wait_idle(timeout))

    wait_idle = blocking(async_wait_idle)

    # --- instances --------------------------------------------------------------------------------

    @checked
    async def async_add(self, count: int = 1) -> list[str]:
        """Serve by so many workers more, and return their ids.

        They serve, all of them from one moment on, once they have the weights of the last update:
        at once under supervision, else after the next update. On an error or an interrupt none of
        them comes.

        Raises: as Scheduler.add_workers, or what building the engines raised; under supervision
            also InstanceLostError, when one of them hangs meanwhile.
        """
        return await run_async(self._pool.add(count))

    add = blocking(async_add)

    @checked
    async def async_drain(
        self, worker_ids: Collection[str | Worker], *, migrate: bool = False
    ) -> None:
        """Give these workers nothing more until undrain, and wait until they have nothing.

        Args:
            migrate: continue what they have elsewhere, with the tokens so far, instead of waiting
                for its end.
        Raises: WorkerNotFoundError; ValueError for one id that is not in a sequence; HelmsmanError
            when undrain takes it back. An interrupt takes it back, too.
        """
        await run_async(self._pool.drain(ids_of(worker_ids), migrate))

    drain = blocking(async_drain)

    @checked
    async def async_undrain(self, worker_ids: Collection[str | Worker]) -> None:
        """Give these workers requests again. Raises: WorkerNotFoundError."""
        await run_async(self._pool.undrain(ids_of(worker_ids)))

    undrain = blocking(async_undrain)

    @checked
    async def async_remove(
        self, worker_ids: Collection[str | Worker], *, migrate: bool = False
    ) -> None:
        """Drain these workers, end them and free what they held; the others keep their ids, and
        these are not given again.

        An error or an interrupt before their end begins leaves them serving; once it has begun, it
        is finished.

        Raises: as drain; InvalidSpecError for all workers that there are, and for those that are
            being removed already; as Scheduler.remove_workers.
        """
        await run_async(self._pool.remove(ids_of(worker_ids), migrate))

    remove = blocking(async_remove)

    @checked
    async def async_scale(self, replicas: int, *, migrate: bool = False) -> None:
        """Serve by so many workers from now on: ``add`` as many as are missing, or ``remove`` the
        last ones. Who scales while another does waits for that, drains included.

        Raises: InvalidSpecError; as these.
        """
        await run_async(self._pool.scale(replicas, migrate))

    scale = blocking(async_scale)

    # --- weights ----------------------------------------------------------------------------------

    @checked
    async def async_update_weights(
        self, weights: ResultHandle | Weights, version: int, timeout: float | None = None
    ) -> int:
        """Serve ``weights`` as ``version`` on every worker, by one call each; requests in flight go
        on with them.

        A worker whose update fails takes no more requests until one succeeds.

        Args:
            weights: what TrainController.export_weights returned, or the parameters themselves, by
                Hugging Face name.
            timeout: seconds for all workers together; the scheduler's ``timeouts.call_s`` when
                None.
        Returns: the version, which every living worker serves now.
        Raises: as call_all, when all workers have answered; under supervision only when no worker
            serves the weights, since the others are left to it.
        """
        return await run_async(self.weight_sink.update_all(weights, version, timeout))

    update_weights = blocking(async_update_weights)

    @checked
    async def async_sleep(
        self, level: int = 1, in_flight: InFlight = "wait", timeout: float | None = None
    ) -> None:
        """Give the devices' memory back: the instances accept nothing until wake, and requests are
        held here. Idempotent.

        Args:
            level: 1 keeps the weights on the hosts; 2 drops them, and an instance serves only after
                an update.
            in_flight: what becomes of requests that instances have: they ``finish`` first, or it
                ``recall``s them with the tokens that they have; they go on after wake.
            timeout: seconds for all of it; the scheduler's ``timeouts.call_s`` when None.
        Raises: RequestsInFlightError when they have not ended or come back, and then no instance
            sleeps; ValueError; as call_all. What fails otherwise may have left some asleep: sleep
            or wake again.
        """
        await run_async(self.weight_sink.sleep(level, in_flight, timeout))

    sleep = blocking(async_sleep)

    @checked
    async def async_wake(self, *, weights_only: bool = False, timeout: float | None = None) -> None:
        """Take the devices' memory again, and send the requests that were held, once there are
        weights. Idempotent.

        Args:
            weights_only: only what weights need: update them now, and wake again for the rest.
            timeout: seconds; the scheduler's ``timeouts.call_s`` when None.
        Raises: as call_all; DeviceMemoryError for a rollout in a DeviceHandoff, when there is not
            enough.
        """
        await run_async(self.weight_sink.wake(weights_only, timeout))

    wake = blocking(async_wake)

    async def async_versions(self) -> dict[str, int]:
        """The weight version that each living worker serves, by worker id."""
        return await run_async(self._instances.ask_all("get_version"))

    versions = blocking(async_versions)
