"""The instances of a rollout role, which come, go and come back while requests run."""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from helmsman.api.errors import (
    EngineCallError,
    EngineDeadError,
    HelmsmanError,
    InvalidSpecError,
    JobError,
    WorkerFailedError,
    WorkerNotFoundError,
)
from helmsman.api.scheduler import Job, Scheduler, Worker
from helmsman.controller._aio.event_loop import await_all, in_own_thread, run_async, run_sync
from helmsman.controller._generation.health import Event, Health, SupervisionPolicy
from helmsman.controller._generation.instance import Instance
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._generation.supervisor import Supervisor
from helmsman.controller._roles.call_all import group_error
from helmsman.controller._rollout.request_api import RolloutRequests, require_ids
from helmsman.controller._validation.argument_types import checked

T = TypeVar("T")


class RolloutInstances(RolloutRequests, abc.ABC):
    """The workers that serve the requests; RolloutWeights says by which weights."""

    _version: int | None
    """Of the last update."""
    _requests: GenerateScheduler | None

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job,
        engine_args: Sequence[Any],
        engine_kwargs: Mapping[str, Any] | None,
        engine_name: str | None,
        max_in_flight_per_worker: int,
        supervision: SupervisionPolicy | None,
    ) -> None:
        """As RoleController.

        Args:
            max_in_flight_per_worker: requests that a worker has at most.
            supervision: with it, workers are probed, and dead ones built anew with the weights of the last update.
        """
        super().__init__(scheduler, engine, job, engine_args, engine_kwargs, engine_name)
        self._max_in_flight_per_worker = max_in_flight_per_worker
        self._supervision = supervision
        self._supervisor: Supervisor | None = None
        self._builds: Counter[str] = Counter()
        """How often each worker was built anew: what is heard of an earlier process is no news of the one that is there."""
        self._leaving: set[str] = set()
        """Those that are being removed."""
        self._looking = asyncio.Lock()
        self._scaling = asyncio.Lock()
        """One after another, so that as many serve in the end as the last one asks for."""

    @abc.abstractmethod
    async def _bring_weights(self, worker_id: str) -> bool:
        """Bring a worker that was just built the weights that are served; whether it has them now."""

    # --- control ----------------------------------------------------------------------------------------------------------

    @checked
    def add(self, count: int = 1) -> list[str]:
        """Serve by so many workers more, and return their ids.

        They serve, all of them from one moment on, once they have the weights of the last update: at once under supervision,
        else after the next update. On an error or an interrupt none of them comes.

        Raises: as Scheduler.add_workers, or what building the engines raised; under supervision also InstanceLostError, when
            one of them hangs meanwhile.
        """
        return run_sync(self._add(count))

    @checked
    async def aadd(self, count: int = 1) -> list[str]:
        """As add, awaited."""
        return await run_async(self._add(count))

    @checked
    def drain(self, worker_ids: Collection[str], *, migrate: bool = False) -> None:
        """Give these workers nothing more until undrain, and wait until they have nothing.

        Args:
            migrate: continue what they have elsewhere, with the tokens so far, instead of waiting for its end.
        Raises: WorkerNotFoundError; ValueError for one id that is not in a sequence; HelmsmanError when undrain takes it back.
            An interrupt takes it back, too.
        """
        run_sync(self._drain(worker_ids, migrate))

    @checked
    async def adrain(self, worker_ids: Collection[str], *, migrate: bool = False) -> None:
        """As drain, awaited."""
        await run_async(self._drain(worker_ids, migrate))

    @checked
    def undrain(self, worker_ids: Collection[str]) -> None:
        """Give these workers requests again. Raises: WorkerNotFoundError."""

        async def undrain() -> None:
            for worker_id in self._known(worker_ids):
                self._queue().undrain(worker_id)

        run_sync(undrain())

    @checked
    def remove(self, worker_ids: Collection[str], *, migrate: bool = False) -> None:
        """Drain these workers, end them and free what they held; the others keep their ids, and these are not given again.

        An error or an interrupt before their end begins leaves them serving; once it has begun, it is finished.

        Raises: as drain; InvalidSpecError for all workers that there are, and for those that are being removed already;
            as Scheduler.remove_workers.
        """
        run_sync(self._remove(worker_ids, migrate))

    @checked
    async def aremove(self, worker_ids: Collection[str], *, migrate: bool = False) -> None:
        """As remove, awaited."""
        await run_async(self._remove(worker_ids, migrate))

    @checked
    def scale(self, replicas: int, *, migrate: bool = False) -> None:
        """Serve by so many workers from now on: ``add`` as many as are missing, or ``remove`` the last ones. Who scales while
        another does waits for that, drains included.

        Raises: InvalidSpecError; as these.
        """
        run_sync(self._scale(replicas, migrate))

    @checked
    async def ascale(self, replicas: int, *, migrate: bool = False) -> None:
        """As scale, awaited."""
        await run_async(self._scale(replicas, migrate))

    # --- calls ------------------------------------------------------------------------------------------------------------

    async def _ask(self, worker_id: str, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Every call to an instance goes through here, so that its death is noticed whichever call meets it."""
        build = self._builds[worker_id]
        try:
            return await self.scheduler.async_call_engine(worker_id, method, self.engine_name, *args, timeout=timeout, **kwargs)
        except (WorkerFailedError, EngineCallError) as error:
            # Not compared with error.worker_id: with colocation the process that died may go by another role's name.
            if is_death(error) and self._supervisor is not None and self._builds[worker_id] == build:
                self._supervisor.note(worker_id, Event.LOST, error)
            raise

    def _living_ids(self) -> list[str]:
        """Of instances that have not died; none while all are on their way back. Raises why none lives or will."""
        instances = self._queue().instances.values()
        living = [each.instance_id for each in instances if each.health.lives]
        if not living and (reason := self._why_none_will_serve("any call")) is not None:
            raise reason
        return living

    def _why_none_will_serve(self, method: str = "agenerate") -> Exception | None:
        """Why no worker serves or will; None while one does, or is on its way back."""
        assert self._requests is not None
        assert self._supervisor is not None
        instances = self._requests.instances
        if any(each.health.serves or self._supervisor.is_coming_back(id_) for id_, each in instances.items()):
            return None
        errors = {id_: each.error or _is_not_served_by(each) for id_, each in instances.items()}
        return group_error(self.role, method, errors, len(instances))

    # --- coming -----------------------------------------------------------------------------------------------------------

    async def _scale(self, replicas: int, migrate: bool) -> None:
        if replicas < 1:
            raise InvalidSpecError(role=self.role, field="replicas", value=replicas, expected="1 or more")
        async with self._scaling:
            serving = self._queue().instances.keys() - self._leaving
            staying = [worker.id for worker in self._workers if worker.id in serving]  # in rank order, however they came
            if replicas > len(staying):
                await self._add(replicas - len(staying))
            else:
                await self._remove(staying[replicas:], migrate)

    async def _add(self, count: int) -> list[str]:
        requests, supervisor = self._queue(), self._supervisor
        assert supervisor is not None
        adding = asyncio.ensure_future(in_own_thread(self.scheduler.add_workers, self.role, count))
        try:
            new = await asyncio.shield(adding)
            await self._look()
            chosen = [worker for worker in self._workers if worker.id in new]
            await supervisor.while_they_answer(new, self._make_ready(chosen, range(len(chosen))))
            have_weights = await self._bring_weights_to_all(new, supervisor)
        except BaseException:
            await _to_its_end(self._undo_add(adding))
            raise
        for worker_id, has_weights in zip(
            new, have_weights, strict=True
        ):  # and no await: what serves cannot be undone so easily
            health = Health.HEALTHY if has_weights else Health.STALE
            supervisor.watch(worker_id, health)  # first: whoever serves by it asks whether it comes back
            requests.add(worker_id, self._max_in_flight_per_worker, health)
        return new

    async def _undo_add(self, adding: asyncio.Future[list[str]]) -> None:
        await asyncio.wait([adding])  # what it still starts would be nobody's
        if adding.exception() is None:
            await self._end(adding.result(), ())

    async def _bring_weights_to_all(self, worker_ids: Sequence[str], supervisor: Supervisor) -> list[bool]:
        """Bring workers that were just built the weights that are served when this returns; which of them have them now."""

        async def bring(worker_id: str) -> bool:
            return await supervisor.while_they_answer([worker_id], self._bring_weights(worker_id))

        while True:
            version = self._version
            have_weights = await await_all(map(bring, worker_ids))
            if version == self._version:
                return have_weights

    async def _rebuild(self, worker_id: str) -> bool:
        """Start a worker anew, with its engine and the weights that are served; whether it has got these."""
        self._builds[worker_id] += 1
        await in_own_thread(self.scheduler.restart_worker, worker_id)
        await self._look()
        chosen = [worker for worker in self._workers if worker.id == worker_id]
        await self._make_ready(chosen, range(len(chosen)))
        return await self._bring_weights(worker_id)

    async def _to_be_left(self) -> dict[str, str]:
        """Instances that are about to go, and why."""
        return {worker_id: notice.reason for worker_id, notice in (await self.scheduler.leaving()).items()}

    async def _look(self) -> None:
        """See which workers there are now; one after another, so that the last look is the one that counts."""
        async with self._looking:
            self._workers = await in_own_thread(_workers_of, self.scheduler, self.role)

    # --- going ------------------------------------------------------------------------------------------------------------

    def _known(self, worker_ids: Collection[str]) -> list[str]:
        require_ids("worker_ids", worker_ids)
        instances = self._queue().instances
        for worker_id in worker_ids:
            if worker_id not in instances:
                raise WorkerNotFoundError(name=worker_id, known=list(instances))
        return list(dict.fromkeys(worker_ids))

    async def _drain(self, worker_ids: Collection[str], migrate: bool) -> None:
        await self._queue().drain(*self._known(worker_ids), migrate=migrate)

    async def _remove(self, worker_ids: Collection[str], migrate: bool) -> None:
        requests, chosen = self._queue(), self._known(worker_ids)
        refused = ""
        if again := self._leaving.intersection(chosen):
            refused = f"workers that are not being removed already, as {', '.join(sorted(again))} are"
        elif chosen and not requests.instances.keys() - self._leaving - set(chosen):
            refused = "one worker at least to stay; close() ends them all"
        if refused:
            raise InvalidSpecError(role=self.role, field="worker_ids", value=list(worker_ids), expected=refused)
        self._leaving.update(chosen)
        try:
            await self._drain(chosen, migrate)
            gone = self._let_go(chosen)  # in the same turn of the loop: in the next, undrain could give them requests again
            await _to_its_end(self._end(chosen, gone))
        finally:
            self._leaving.difference_update(chosen)

    def _let_go(self, worker_ids: Sequence[str]) -> list[Instance]:
        """Serve without these workers, which have nothing; returns those by which it has served."""
        requests, supervisor = self._queue(), self._supervisor
        assert supervisor is not None
        gone = [requests.instances[worker_id] for worker_id in worker_ids if worker_id in requests.instances]
        for instance in gone:
            requests.remove(instance.instance_id)
            supervisor.forget(instance.instance_id)
        return gone

    async def _end(self, worker_ids: Sequence[str], gone: Sequence[Instance]) -> None:
        """End workers that were let go."""
        try:
            await in_own_thread(self.scheduler.remove_workers, self.role, worker_ids)
        except JobError:  # it ends none of them
            requests, supervisor = self._queue(), self._supervisor
            assert supervisor is not None
            for instance in gone:
                supervisor.watch(instance.instance_id, instance.health)
                requests.add(instance.instance_id, instance.capacity, instance.health).error = instance.error
            raise
        finally:
            await self._look()


def is_death(error: Exception) -> bool:
    """Of an instance: of its worker, or of what its engine runs in other processes."""
    return isinstance(error, WorkerFailedError) or isinstance(error.__cause__, EngineDeadError)


def _is_not_served_by(instance: Instance) -> HelmsmanError:
    """Why, where nothing has gone wrong with it."""
    return HelmsmanError(
        f"{instance.instance_id} is {instance.health.value}: it has not got the weights of the last update, and serves after "
        "the next one.",
        worker_id=instance.instance_id,
    )


def _workers_of(scheduler: Scheduler, role: str) -> tuple[Worker, ...]:
    return tuple(scheduler.get_workers(role, 0))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not be left half done: a cancellation is raised once it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
