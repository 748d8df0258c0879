"""RolloutController: prompts go to the least loaded of a role's workers and come back in the caller's order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from helmsman.api.errors import (
    EngineCallError,
    EngineDeadError,
    InstanceLostError,
    WorkerFailedError,
)
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.scheduler import Job, ResultHandle, Scheduler
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._generation.health import SupervisionPolicy
from helmsman.controller._generation.instance import InstanceLoad, RolloutLoad
from helmsman.controller._generation.request_factory import RequestMaker
from helmsman.controller._generation.retries import RetryPolicy, RetryUnbegun
from helmsman.controller._generation.routing import RoutingPolicy
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._generation.supervisor import Supervisor
from helmsman.controller._roles.call_all import release
from helmsman.controller._rollout.weight_state import RolloutWeights
from helmsman.controller._transport.health import require_answer


class RolloutController(RolloutWeights):
    """The rollout instances of one role.

    A request has one end, whatever happens. When its worker dies, it fails with WorkerFailedError or, with
    ``retries=RetryGeneration()``, goes on at another; the dead worker takes no more, and when none is left every request fails.
    Instances come and go while requests run (``add``, ``drain``, ``remove``, ``scale``). Methods whose names begin with ``a``
    are awaited, from any event loop; the others block.
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
        request_timeout_s: float | None = None,
        policy: RoutingPolicy | None = None,
        retries: RetryPolicy | None = None,
        supervision: SupervisionPolicy | None = None,
        samples_by_engine: bool = False,
    ) -> None:
        """As RoleController.

        Args:
            max_in_flight_per_worker: requests that a worker has at most; the rest waits here.
            max_queue: requests given to submit that wait here at most; submit blocks beyond it.
            max_in_flight: requests that all workers together have at most.
            policy: which worker takes a request; LeastOutstandingTokens when None.
            retries: which requests go on at another worker when theirs dies; RetryUnbegun, those that it had not begun, when
                None.
            supervision: probe the workers, and build dead ones anew, which serve again once they have the weights of the last
                update (kept for that until the next one). Workers that are about to go (Scheduler.leaving) are left in time:
                what they have is continued elsewhere, and they are built anew where there is room. With None a worker's death
                is noticed by its calls, and final.
            samples_by_engine: give a prompt's samples to one worker by one call of its engine's ``agenerate_samples``, which
                computes the prompt once, when it has room for all of them. Otherwise each is a request of its own and goes
                where there is room.
            request_timeout_s: seconds from sending a request to its result; the scheduler's ``timeouts.call_s`` when None.
        """
        super().__init__(scheduler, engine, job, engine_args, engine_kwargs, engine_name, max_in_flight_per_worker, supervision)
        bounds = {"max_in_flight_per_worker": max_in_flight_per_worker, "max_queue": max_queue, "max_in_flight": max_in_flight}
        for name, value in bounds.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        self._max_queue = max_queue
        self._max_in_flight = max_in_flight
        self._policy, self._retries = policy, retries
        self._probe_limit_s = 2.0 * (supervision or SupervisionPolicy()).dead_s
        """Longer than the supervisor waits, whose limits count."""
        self._request_timeout_s = request_timeout_s
        self._samples_by_engine, self._maker = samples_by_engine, RequestMaker(self.role)
        self._requests: GenerateScheduler | None = None

    # --- control ----------------------------------------------------------------------------------------------------

    def load(self) -> RolloutLoad:
        """What waits, what is in flight and which workers serve."""

        async def load() -> RolloutLoad:
            requests = self._queue()
            return RolloutLoad(
                num_queued=requests.num_queued,
                paused=requests.is_suspended,
                instances={
                    id_: InstanceLoad(
                        state=each.health,
                        num_in_flight=each.num_in_flight,
                        outstanding_tokens=each.outstanding_tokens,
                        is_draining=each.is_draining,
                    )
                    for id_, each in requests.instances.items()
                },
            )

        return run_sync(load())

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _explain(self, error: Exception) -> None:
        if self.turn is not None:
            await self.turn.explain(error)

    async def _probe(self, worker_id: str) -> bool:
        try:
            health = await require_answer(self.scheduler, worker_id, self._probe_limit_s)
        except WorkerFailedError as error:
            raise InstanceLostError(instance_id=worker_id, reason=str(error), may_have_begun=True) from error
        if (reason := health.failure or health.failed_engines.get(self.engine_name or worker_id)) is not None:
            raise InstanceLostError(instance_id=worker_id, reason=reason, may_have_begun=True)
        return health.is_busy

    # --- life ----------------------------------------------------------------------------------------------------

    def _queue(self) -> GenerateScheduler:
        self._check_started()
        assert self._requests is not None
        return self._requests

    def _after_death(self) -> str:
        supervised = "Its RolloutController starts it again"
        if self._supervision is None:
            supervised = "With supervision=SupervisionPolicy() its RolloutController starts dead instances again"
        retried = "its retries decide which requests go on elsewhere"
        if self._retries is None or isinstance(self._retries, RetryUnbegun):
            retried = "with retries=RetryGeneration() requests that it had begun go on elsewhere"
        return f"{supervised}, and {retried}."

    def _on_started(self) -> None:
        async def start() -> GenerateScheduler:
            requests = GenerateScheduler(
                _Workers(self._ask, self._request_timeout_s, self._explain),
                policy=self._policy,
                retries=self._retries,
                max_in_flight=self._max_in_flight,
                max_queue=self._max_queue,
                why_hopeless=self._why_hopeless,
            )
            policy = self._supervision or SupervisionPolicy()
            self._supervisor = Supervisor(requests, policy, self._probe, self._rebuild, self._to_be_left)
            for worker in self.workers:
                self._supervisor.watch(worker.id)
                requests.add(worker.id, self._max_in_flight_per_worker)
            if self._supervision is not None:
                self._supervisor.start()
            return requests

        self._requests = run_sync(start())

    def _why_hopeless(self) -> Exception | None:
        """As _why_none_will_serve; what waits has hope, while an instance lives, as long as weights are brought, and for those
        that sleep has dropped."""
        assert self._requests is not None
        may_serve_yet = self._num_updating or self._sleep_level or self._lacks_weights
        if may_serve_yet and any(each.health.lives for each in self._requests.instances.values()):
            return None
        return self._why_none_will_serve()

    def _on_closing(self) -> None:
        requests, supervisor = self._requests, self._supervisor
        assert requests is not None
        assert supervisor is not None

        async def close() -> None:
            supervisor.stop()
            old, self._served = self._served, None
            if old is not None and isinstance(old[0], ResultHandle):
                await asyncio.to_thread(release, self.scheduler, old[0])
            requests.close(f"the controller of role {self.role!r} was closed")

        run_sync(close())


class _Workers:
    """The workers of a role as the backend of a GenerateScheduler."""

    def __init__(
        self,
        ask: Callable[..., Coroutine[Any, Any, Any]],
        timeout_s: float | None,
        explain: Callable[[Exception], Awaitable[None]],
    ) -> None:
        self._ask, self._timeout_s, self._explain = ask, timeout_s, explain

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        result: GenerationResult = await self._lost(
            instance_id, self._ask(instance_id, "agenerate", request, timeout=self._timeout_s)
        )
        return result

    async def generate_samples(self, instance_id: str, requests: Sequence[GenerationRequest]) -> Sequence[GenerationResult]:
        results: Sequence[GenerationResult] = await self._lost(
            instance_id, self._ask(instance_id, "agenerate_samples", list(requests), timeout=self._timeout_s)
        )
        return results

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        await self._lost(instance_id, self._ask(instance_id, "abort", list(request_ids)))

    async def _lost(self, instance_id: str, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except WorkerFailedError as error:
            raise InstanceLostError(instance_id=instance_id, reason=str(error), may_have_begun=True) from error
        except EngineCallError as error:
            if isinstance(error.__cause__, EngineDeadError):
                raise InstanceLostError(instance_id=instance_id, reason=error.__cause__.reason, may_have_begun=True) from error
            await self._explain(error)
            raise
