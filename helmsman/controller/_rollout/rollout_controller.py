"""RolloutController: sends prompts to the workers of a role and returns their results."""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

import msgspec

from helmsman._base.event_loop import run_async
from helmsman.api.closing import Starting
from helmsman.api.errors import HelmsmanError
from helmsman.api.generation import GenerationResult, InFlight, SamplingParams
from helmsman.api.run_state import RolloutSnapshot
from helmsman.api.scheduler import Job, ResultHandle, Scheduler, Worker, ids_of
from helmsman.api.weights import Weights
from helmsman.controller._groups.role_controller import DeviceOwner, StartedRole, blocking
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import SupervisionPolicy
from helmsman.controller._rollout.instance_pool import InstancePool
from helmsman.controller._rollout.instances import Instances
from helmsman.controller._rollout.partial_sleep import PartialSleep
from helmsman.controller._rollout.request import RequestOptions, RolloutStats
from helmsman.controller._rollout.request_api import OnError, Prompt, RolloutRequests, samples_of
from helmsman.controller._rollout.retries import RetryPolicy
from helmsman.controller._rollout.routing import RoutingPolicy
from helmsman.controller._rollout.weight_state import RolloutWeights
from helmsman.controller._scheduler.argument_types import refusal, require_integer, require_seconds


class RolloutController(Starting):
    """The rollout instances of one role.

    A request ends exactly once. When its worker dies, it fails with WorkerFailedError or, with
    ``retries=RetryGeneration()``, continues on another worker. The dead worker receives no further
    requests; when no worker is left, every request fails. Instances can be added and removed while
    requests run (``add``, ``drain``, ``remove``, ``scale``). Each operation ``x`` blocks;
    ``async_x`` is awaited, from any event loop, with the same arguments and result.

    The constructor starts nothing; ``with`` or ``initialize`` starts the workers.

    Args:
        scheduler: Scheduler of the workers.
        engine: The InferenceEngine, as an import path 'package.module.Class' or a class.
        job: Role, replicas and resources of each worker. Or a started Cluster whose class is
            ``engine``: its workers are the instances, and remain when the controller is closed.
        engine_args: Positional arguments of the engine's constructor, the same on every worker.
        engine_kwargs: Keyword arguments of the engine's constructor, the same on every worker.
        engine_name: Name of the engine in each worker; the worker's id when None.
        max_in_flight_per_worker: Maximum requests in flight per worker; further ones are queued.
        max_queue: Maximum queued requests of ``submit``, which blocks beyond it. The other methods
            ignore it.
        max_in_flight: Maximum requests in flight on all workers together; no limit when None.
        request_timeout: Seconds from sending a request to its result; the scheduler's
            ``timeouts.call_s`` when None.
        policy: Chooses the worker of a request; LeastOutstandingTokens when None.
        retries: Decides which requests of a dead worker continue on another; RetryUnbegun, which
            retries only requests that the worker had not begun, when None.
        supervision: Health probes and rebuilds. A dead worker is rebuilt and serves once it has the
            weights of the last update, which are kept until the next one. Workers with a
            preemption notice are evacuated: their requests continue elsewhere, and they are rebuilt
            where there is room. When None, only a call detects a death, which is final.
        samples_by_engine: Send all samples of a prompt to one worker in one call of its engine's
            ``agenerate_samples``, which computes the prompt once, when it has room for all of them.
            Otherwise each sample is a separate request.

    Raises:
        ValueError: A limit is below 1, or a Cluster is given with engine arguments.
        InvalidSpecError: A worker of the Cluster is not an instance by itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job | StartedRole,
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
        self.scheduler = scheduler
        self.device_owner: DeviceOwner | None = (
            None  # set by a DeviceHandoff, which shares the devices with a trainer
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
        """Receiver of a weight sync."""
        self._pool = InstancePool(self._instances, self.weight_sink)
        self._naps = PartialSleep(self._instances, self._requests, self.weight_sink)
        me = weakref.ref(self)
        scheduler.reporter.describe_by(self.role, lambda: _describe(me()), me)

    @property
    def role(self) -> str:
        """Name of the role."""
        return self._instances.role

    @property
    def job(self) -> Job:
        """Role, replicas and resources of each worker."""
        return self._instances.job

    @property
    def engine_name(self) -> str | None:
        """Name of the engine in each worker; the worker's id when None."""
        return self._instances.engine_name

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The role's workers in rank order; raises unless the controller is started."""
        return self._instances.workers

    @property
    def is_started(self) -> bool:
        """Whether the workers have started and ``close`` was not called."""
        return self._instances.is_started

    def initialize(self) -> None:
        """Start the workers and build their engines. Idempotent.

        On an error nothing of the role remains. It runs in the caller's thread, so that an
        interrupt reaches the scheduler's own start.

        Raises:
            JobError: The job is invalid.
            StartError: The workers could not start.
            GroupCallError: An engine could not be built; the root cause comes first. A role with
                one worker raises the error itself.
        """
        self._instances.initialize()

    def close(self) -> None:
        """Destroy the engines and end the workers. Idempotent; no effect on a closed scheduler.

        Raises:
            ShutdownIncompleteError: Processes of workers are still alive.
        """
        self._instances.close()

    async def async_stats(self) -> RolloutStats:
        """Return queued requests, requests in flight, and the state of each worker."""
        return await run_async(self._instances.stats())

    stats = blocking(async_stats)

    # --- generation -------------------------------------------------------------------------------

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
            options: Priority, session and other options of all requests.
            num_samples: Samples of each prompt. The k-th sample of the request ``id`` is the
                request ``id#k``. Its seed follows from the prompt's; it has none when that has
                none.

        Returns:
            ``len(prompts) * num_samples`` results.

        Raises:
            ValueError: A prompt is invalid, or an id is in use already; nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the rollout, and its
                ``hold_requests`` is False.
            GroupCallError: A request failed at a worker; the root cause comes first. A role with
                one worker raises the error itself, such as WorkerFailedError.
        """
        requests = self._requests.maker.make_all(prompts, sampling, num_samples)
        return await run_async(self._requests.generate(requests, num_samples, options))

    generate = blocking(async_generate)

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
            options: Priority, session and other options of the request.
            resume_from: A result of this prompt with stop_reason 'abort'. The request continues
                after its tokens, on any worker. The result has all tokens, each with its
                log-probability and version, and ``max_new_tokens`` counts all of them. With the
                same seed and weights the result equals, up to rounding, that without the abort.

        Returns:
            The result.

        Raises:
            ValueError: The prompt is invalid, its id is in use already, or ``resume_from`` cannot
                be continued.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the rollout, and its
                ``hold_requests`` is False.
            WorkerFailedError: The worker died, and ``retries`` did not allow another attempt.
            InstanceLostError: Under supervision, the worker stopped responding, and ``retries`` did
                not allow another attempt.
            EngineCallError: The engine raised an error, or its processes have died.
            CallTimeoutError: The worker did not reply within ``request_timeout``.
            RequestDeadlineError: The request exceeded ``RequestOptions.deadline_s``.
        """
        return await run_async(self._requests.generate_one(prompt, sampling, options, resume_from))

    generate_one = blocking(async_generate_one)

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
            num_samples: Number of results.
            sampling: The defaults when None.
            options: Priority, session and other options of the requests.

        Returns:
            ``num_samples`` results.

        Raises:
            ValueError: The prompt or ``num_samples`` is invalid, or an id is in use already;
                nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the rollout, and its
                ``hold_requests`` is False.
            GroupCallError: A request failed at a worker; the root cause comes first. A role with
                one worker raises the error itself, such as WorkerFailedError.
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

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Continue all prompts and yield each result as it ends.

        Requests are sent when the first item is requested. Leaving the loop early, also by an
        error, aborts the remaining requests. With ``samples_by_engine``, samples of one call arrive
        together.

        Args:
            prompts: Token ids of each prompt, or GenerationRequests.
            sampling: For all prompts, or one for each; the defaults when None.
            options: Priority, session and other options of all requests.
            num_samples: Samples of each prompt.
            on_error: ``raise`` the first failure, which ends the stream, or ``yield`` each failure
                as ``(index, error)``.

        Returns:
            Iterator of ``(index, result)``. ``index`` is the position in the results of
            ``generate``, so ``index // num_samples`` is that of the prompt.

        Raises:
            ValueError: A prompt or ``on_error`` is invalid. Raised by the call itself, before the
                first item.
            Exception: With ``on_error='raise'``, the error of the first request that failed.
                Raised by the iterator.
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

    def async_stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        num_samples: int = 1,
        on_error: OnError = "raise",
    ) -> AsyncIterator[tuple[int, GenerationResult | Exception]]:
        """Continue all prompts and yield each result as it ends, for ``async for``.

        A ``break`` aborts the remaining requests once the iterator is garbage-collected;
        ``contextlib.aclosing`` aborts them at the end of its block.

        Args:
            prompts: Token ids of each prompt, or GenerationRequests.
            sampling: For all prompts, or one for each; the defaults when None.
            options: Priority, session and other options of all requests.
            num_samples: Samples of each prompt.
            on_error: ``raise`` the first failure, which ends the stream, or ``yield`` each failure
                as ``(index, error)``.

        Returns:
            Iterator of ``(index, result)``. ``index`` is the position in the results of
            ``generate``, so ``index // num_samples`` is that of the prompt.

        Raises:
            ValueError: A prompt or ``on_error`` is invalid. Raised by the call itself, before the
                first item.
            Exception: With ``on_error='raise'``, the error of the first request that failed.
                Raised by the iterator.
        """
        requests = self._requests.maker.make_all(prompts, sampling, num_samples)
        return self._requests.async_stream(requests, options, num_samples, on_error)

    async def async_submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        resume_from: GenerationResult | None = None,
    ) -> Future[GenerationResult]:
        """Queue one prompt and return its future; waits while ``max_queue`` of these are queued.

        Args:
            prompt: Token ids, or a GenerationRequest.
            sampling: The defaults when None.
            options: Priority, session and other options of the request.
            resume_from: A result of this prompt with stop_reason 'abort', to continue after its
                tokens.

        Returns:
            The future of the result. Cancelling it withdraws a queued request; ``abort`` ends one
            that is in flight. Its callbacks run on Helmsman's event loop.

        Raises:
            ValueError: The prompt is invalid, its id is in use already, or ``resume_from`` cannot
                be continued.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the rollout, and its
                ``hold_requests`` is False.
            HelmsmanError: No worker will serve requests any more. Errors of the request itself are
                raised by the future.
        """
        return await run_async(self._requests.submit(prompt, sampling, options, resume_from))

    submit = blocking(async_submit)

    # --- flow of requests -------------------------------------------------------------------------

    async def async_abort(self, request_ids: Collection[str] | None = None) -> int:
        """End requests early; each returns the tokens that it has, with stop_reason 'abort'.

        Queued requests have ended when this returns. Requests in flight end once their worker
        returns them; ``wait_idle`` waits for that. Later requests are not affected: call ``pause``
        first to end every request.

        Args:
            request_ids: Ids of the requests; all current requests when None.

        Returns:
            Number of requests that were ended.

        Raises:
            ValueError: ``request_ids`` is a single id instead of a collection.
        """
        return await run_async(self._requests.abort(request_ids))

    abort = blocking(async_abort)

    async def async_pause(self, in_flight: InFlight = "keep", timeout: float | None = None) -> None:
        """Stop sending requests to workers until ``resume``; new requests are still queued.

        Args:
            in_flight: Effect on requests in flight. ``keep`` lets them run, and returns at once.
                ``wait`` returns when they have ended. ``abort`` takes them back with the tokens
                that they have, and returns when their workers have returned them. Aborted requests
                are queued and continue on any worker after ``resume``; their cached keys are
                computed again with the weights of that time. A request that ends meanwhile is done.
            timeout: Seconds to wait for that. None waits until the workers' calls end, each at most
                ``request_timeout`` after it was sent.

        Raises:
            ValueError: ``in_flight`` is invalid.
            RequestsInFlightError: Requests were still in flight after ``timeout``; names their
                workers. The flow is paused nevertheless, and aborted requests still return when
                their worker replies. If the worker dies, ``retries`` decides about them.
        """
        require_seconds("pause", timeout)
        await run_async(self._requests.pause(in_flight, timeout))

    pause = blocking(async_pause)

    async def async_resume(self) -> None:
        """Send queued requests again, as soon as no update of the weights holds them either."""
        await run_async(self._requests.resume())

    resume = blocking(async_resume)

    async def async_wait_idle(self, timeout: float | None = None) -> None:
        """Wait until no request is in flight and, unless paused, none is queued.

        Requests that arrive meanwhile are awaited as well. While other callers submit requests, the
        state lasts only for a moment; after ``pause`` it lasts until ``resume``.

        Args:
            timeout: Seconds; no limit when None.

        Raises:
            RequestsInFlightError: Requests are left after ``timeout``.
        """
        require_seconds("wait_idle", timeout)
        await run_async(self._requests.wait_idle(timeout))

    wait_idle = blocking(async_wait_idle)

    # --- instances --------------------------------------------------------------------------------

    async def async_add(self, count: int = 1) -> list[str]:
        """Add workers. On an error or an interrupt none of them is added.

        All of them start to serve together, once they have the weights of the last update: at once
        under supervision, otherwise after the next update.

        Args:
            count: Number of workers.

        Returns:
            Their ids.

        Raises:
            InvalidSpecError: ``count`` is below 1, or the role cannot grow.
            StartError: The workers could not start.
            InstanceLostError: Under supervision, one of them stopped responding.
            GroupCallError: An engine could not be built. A single new worker raises the error
                itself.
        """
        require_integer("add", "count", count)
        return await run_async(self._pool.add(count))

    add = blocking(async_add)

    async def async_drain(
        self, worker_ids: Collection[str | Worker], *, migrate: bool = False
    ) -> None:
        """Send these workers no more requests until ``undrain``, and wait until they have none.

        An interrupt cancels the drain.

        Args:
            worker_ids: Ids of the workers, or Workers.
            migrate: True continues their requests elsewhere, with the tokens so far, instead of
                waiting for their end.

        Raises:
            WorkerNotFoundError: A worker does not exist.
            ValueError: ``worker_ids`` is a single id instead of a collection.
            HelmsmanError: ``undrain`` ended the drain while requests were running.
        """
        await run_async(self._pool.drain(ids_of(worker_ids), migrate))

    drain = blocking(async_drain)

    async def async_undrain(self, worker_ids: Collection[str | Worker]) -> None:
        """Send requests to these workers again; ends all their drains.

        Args:
            worker_ids: Ids of the workers, or Workers.

        Raises:
            WorkerNotFoundError: A worker does not exist.
            ValueError: ``worker_ids`` is a single id instead of a collection.
        """
        await run_async(self._pool.undrain(ids_of(worker_ids)))

    undrain = blocking(async_undrain)

    async def async_remove(
        self, worker_ids: Collection[str | Worker], *, migrate: bool = False
    ) -> None:
        """Drain these workers, end them and free their resources.

        The other workers keep their ids, and removed ids are not used again. An error or an
        interrupt during the drain leaves the workers serving; afterwards the removal completes.

        Args:
            worker_ids: Ids of the workers, or Workers.
            migrate: True continues their requests elsewhere, with the tokens so far, instead of
                waiting for their end.

        Raises:
            WorkerNotFoundError: A worker does not exist.
            ValueError: ``worker_ids`` is a single id instead of a collection.
            InvalidSpecError: No worker would be left, a worker is being removed already, or another
                role uses one.
            HelmsmanError: ``undrain`` ended the drain while requests were running.
            ShutdownIncompleteError: Processes of the workers are still alive.
        """
        await run_async(self._pool.remove(ids_of(worker_ids), migrate))

    remove = blocking(async_remove)

    async def async_scale(self, replicas: int, *, migrate: bool = False) -> None:
        """Resize to ``replicas`` workers by ``add``, or by ``remove`` of the last ones.

        Concurrent calls are serialized, drains included.

        Args:
            replicas: Number of workers.
            migrate: True continues requests of removed workers elsewhere, with the tokens so far,
                instead of waiting for their end.

        Raises:
            InvalidSpecError: ``replicas`` is below 1, or the role cannot be resized.
            StartError: Added workers could not start.
            InstanceLostError: Under supervision, an added worker stopped responding.
            GroupCallError: An engine could not be built. A single new worker raises the error
                itself.
            HelmsmanError: ``undrain`` ended the drain of a removed worker while it had requests.
            ShutdownIncompleteError: Processes of removed workers are still alive.
        """
        require_integer("scale", "replicas", replicas)
        await run_async(self._pool.scale(replicas, migrate))

    scale = blocking(async_scale)

    # --- weights ----------------------------------------------------------------------------------

    async def async_update_weights(
        self, weights: ResultHandle | Weights, version: int, timeout: float | None = None
    ) -> int:
        """Load weights on every worker; requests in flight continue with them.

        A worker whose update fails receives no requests until an update succeeds.

        Args:
            weights: A handle, such as that of ``Scheduler.put``, or the parameters by their
                Hugging Face names.
            version: Weight version of these weights.
            timeout: Seconds for all workers together; the scheduler's ``timeouts.call_s`` when
                None.

        Returns:
            The version. Every live worker serves it now; under supervision, workers whose update
                failed do not serve until a later one.

        Raises:
            ValueError: ``version`` is below that of the last update.
            HelmsmanError: The role is asleep without memory for weights, or another update was
                running for all of ``timeout``. No worker has changed.
            GroupCallError: An update failed; the root cause comes first. A role with one worker
                raises the error itself. It is raised once all workers have replied; under
                supervision only if no worker serves the weights or will.
        """
        if not isinstance(weights, Mapping | msgspec.Struct):
            raise refusal("update_weights", "weights", weights, "ResultHandle | Weights")
        require_integer("update_weights", "version", version)
        require_seconds("update_weights", timeout)
        return await run_async(self.weight_sink.update_all(weights, version, timeout))

    update_weights = blocking(async_update_weights)

    async def async_sleep(
        self,
        level: int = 1,
        in_flight: InFlight = "wait",
        timeout: float | None = None,
        *,
        worker_ids: Collection[str | Worker] | None = None,
    ) -> None:
        """Free the devices' memory until ``wake``; requests are queued meanwhile. Idempotent.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, so that an instance serves
                only after an update.
            in_flight: ``wait`` lets requests in flight end first; ``abort`` takes them back with
                the tokens that they have, and they continue after ``wake``.
            timeout: Seconds for the whole operation; the scheduler's ``timeouts.call_s`` when None.
            worker_ids: Only these workers sleep, such as ``cluster.workers_on([4, 5])``, and the
                others serve all requests. Updates of the weights leave them out, and a dead one is
                rebuilt only after ``wake``. None: all workers.

        Raises:
            ValueError: ``level`` is not 1 or 2, or ``in_flight`` is not 'wait' or 'abort'.
            WorkerNotFoundError: A worker does not exist.
            InvalidSpecError: All workers are named, or those left over sleep already.
            RequestsInFlightError: Requests did not end or return in time; no instance sleeps.
            HelmsmanError: An update of the weights was running for all of ``timeout``.
            GroupCallError: The call failed at a live worker; the root cause comes first. A role
                with one worker raises the error itself. Other workers may be asleep: call ``sleep``
                or ``wake`` again. The death of a worker is only logged while others are left.
        """
        require_seconds("sleep", timeout)
        if worker_ids is None:
            await run_async(self.weight_sink.sleep(level, in_flight, timeout))
        else:
            await run_async(self._naps.sleep(ids_of(worker_ids), level, in_flight, timeout))

    sleep = blocking(async_sleep)

    async def async_wake(
        self,
        *,
        weights_only: bool = False,
        timeout: float | None = None,
        worker_ids: Collection[str | Worker] | None = None,
    ) -> None:
        """Allocate the devices' memory again, and send queued requests once there are weights.

        Idempotent. Without ``worker_ids``, workers that were put to sleep by their ids stay asleep.

        Args:
            weights_only: True allocates memory for weights alone: update them, then call ``wake``
                again for the rest.
            timeout: Seconds; the scheduler's ``timeouts.call_s`` when None.
            worker_ids: Only these workers, which ``sleep(worker_ids=...)`` has put to sleep. If
                they missed an update, they serve once they have its weights: at once under
                supervision if those are kept, otherwise after the next update.

        Raises:
            ValueError: ``weights_only`` is given for some workers; they need all their memory.
            WorkerNotFoundError: A worker does not exist.
            DeviceMemoryError: In a DeviceHandoff, the devices do not have enough free memory.
            HelmsmanError: An update of the weights was running for all of ``timeout``.
            GroupCallError: The call failed at a live worker; the root cause comes first. A role
                with one worker raises the error itself. The death of a worker is only logged while
                others are left.
        """
        require_seconds("wake", timeout)
        if worker_ids is None:
            await run_async(self.weight_sink.wake(weights_only, timeout))
        elif weights_only:
            raise ValueError("weights_only applies to all workers; leave out worker_ids")
        else:
            await run_async(self._naps.wake(ids_of(worker_ids), timeout))

    wake = blocking(async_wake)

    async def async_versions(self) -> dict[str, int]:
        """Return the weight version that each live worker serves, by worker id.

        Raises:
            GroupCallError: The call failed at a worker; the root cause comes first. If one worker
                is alive, the error itself is raised.
        """
        return await run_async(self._instances.ask_all("get_version"))

    versions = blocking(async_versions)


def _describe(controller: RolloutController | None) -> RolloutSnapshot | None:
    """Describe a rollout for the run's snapshots; None before its start and after its end."""
    if controller is None:
        return None
    try:
        requests = controller._instances.requests
    except HelmsmanError:
        return None
    weights = controller.weight_sink
    return requests.describe(
        controller.role, weights.version, is_asleep=not weights.state.is_serving
    )
