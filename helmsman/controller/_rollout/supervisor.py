"""Supervises rollout instances: drains them before a preemption, and restarts dead ones."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.api.supervision import Monitor, Report, RestartBudget, Sign, Watch
from helmsman.api.workers import PreemptionNotice
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health, HealthEvent, SupervisionPolicy, follow
from helmsman.controller._scheduler.driver_log import story

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Supervised:
    """State of one supervised instance."""

    health: Health
    budget: RestartBudget
    restart_at: float | None = None
    """Time of its rebuild; None unless it is dead and has restart budget left."""
    heeded: PreemptionNotice | None = None
    """The last preemption notice that was acted on."""
    again: asyncio.TimerHandle | None = None
    """Retries after a spent budget, once its window has room."""
    restarting: asyncio.Task[None] | None = None
    moving: asyncio.Task[None] | None = None
    death: asyncio.Future[None] | None = None
    """Done when it dies; None while no coroutine waits for it."""

    @property
    def is_restarting(self) -> bool:
        """Whether a rebuild is running or planned."""
        return self.restarting is not None and not self.restarting.done()

    def cancel(self) -> None:
        if self.again is not None:
            self.again.cancel()
        for task in (self.restarting, self.moving):
            if task is not None:
                task.cancel()


class Supervisor:
    """Supervises the instances of a GenerateScheduler.

    An instance that will be preempted is drained, its requests continue on others, and it is
    rebuilt, on another node if possible. If it was rebuilt in the same place, the same notice does
    not drain it again.

    Args:
        requests: Scheduler of the requests, which receives the health of its instances.
        policy: Limits for probes and restarts.
        monitor: Monitor of the scheduler that runs the instances.
        rebuild: Restarts an instance and loads the served weights; raises if it cannot. Returns
            whether the weights are loaded; if not, the instance waits for the next update.
        engine_name: Name of the instances' engines; the instance's id when None. A failed engine
            makes its instance dead.
    """

    def __init__(
        self,
        requests: GenerateScheduler,
        policy: SupervisionPolicy,
        monitor: Monitor,
        rebuild: Callable[[str], Awaitable[bool]],
        engine_name: str | None = None,
    ) -> None:
        self._requests = requests
        self._policy = policy
        self._monitor = monitor
        self._rebuild = rebuild
        self._engine_name = engine_name
        self._supervised: dict[str, _Supervised] = {}
        self._watch: Watch | None = None
        requests.on_lost(lambda instance_id, error: self.note(instance_id, HealthEvent.LOST, error))

    def watch(self, instance_id: str, health: Health = Health.HEALTHY) -> None:
        """Start to supervise an instance; a DEAD one is rebuilt."""
        policy = self._policy
        budget = RestartBudget(policy.max_restarts, policy.restart_window_s, policy.restart_pause_s)
        supervised = self._supervised[instance_id] = _Supervised(health, budget)
        if self._watch is not None and health.is_alive:
            self._watch.add(instance_id)
        elif health is Health.DEAD:
            self._plan_restart(instance_id, supervised, pause_s=None)

    def forget(self, instance_id: str) -> None:
        if (supervised := self._supervised.pop(instance_id, None)) is not None:
            supervised.cancel()
            self._mark_gone(instance_id, supervised)

    def start(self) -> None:
        """Start probing and rebuilding; before this, only ``note`` changes the health."""
        living = [
            instance_id for instance_id, each in self._supervised.items() if each.health.is_alive
        ]
        self._watch = Watch(
            self._monitor, self._policy, self._on_report, living, suspect_s=self._policy.suspect_s
        )

    def stop(self) -> None:
        """Stop probing and rebuilding. Idempotent."""
        for supervised in self._supervised.values():
            supervised.cancel()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def note(self, instance_id: str, event: HealthEvent, error: Exception | None = None) -> None:
        if (supervised := self._supervised.get(instance_id)) is None:
            return
        before, after = supervised.health, follow(supervised.health, event)
        if after is before:
            return
        supervised.health = after
        story.info("%s: %s after %s", instance_id, after.value, event.value)
        if after is Health.DEAD:
            self._mark_gone(instance_id, supervised)
            self._plan_restart(
                instance_id, supervised, pause_s=0.0 if event is HealthEvent.EVACUATED else None
            )
        elif before is Health.RESTARTING and self._watch is not None:
            self._watch.add(instance_id)
        self._requests.set_health(instance_id, after, error)

    def _plan_restart(
        self, instance_id: str, supervised: _Supervised, pause_s: float | None
    ) -> None:
        """Schedule the rebuild of a dead instance after ``pause_s`` seconds.

        None takes one restart, and the pause before it, from the budget.
        """
        if self._watch is None:
            return
        now = asyncio.get_running_loop().time()
        if pause_s is None:
            pause_s = supervised.budget.spend(now)
        supervised.restart_at = None if pause_s is None else now + pause_s
        if pause_s is None:
            num_others = sum(each.health is not Health.DEAD for each in self._supervised.values())
            wait_s = supervised.budget.free_in_s(now)
            when = "" if math.isinf(wait_s) else f" for {wait_s:.0f} s"
            log.warning(
                "%s stays dead%s, as its restarts are used up; %d instances remain",
                instance_id,
                when,
                num_others,
            )
            if when:
                supervised.again = asyncio.get_running_loop().call_later(
                    wait_s, self._plan_again, instance_id, supervised
                )
        elif not supervised.is_restarting:
            supervised.restarting = asyncio.create_task(self._restart(instance_id, supervised))

    def _plan_again(self, instance_id: str, supervised: _Supervised) -> None:
        if supervised.health is Health.DEAD and supervised.restart_at is None:
            self._plan_restart(instance_id, supervised, pause_s=None)

    def _mark_gone(self, instance_id: str, supervised: _Supervised) -> None:
        if self._watch is not None:
            self._watch.discard(instance_id)
        death, supervised.death = supervised.death, None
        if death is not None:
            death.set_result(None)

    async def until_dead(self, instance_id: str) -> None:
        """Wait until an instance dies, is evacuated or is forgotten.

        Return at once if it is not supervised; an earlier death does not count.
        """
        if (supervised := self._supervised.get(instance_id)) is not None:
            supervised.death = supervised.death or asyncio.get_running_loop().create_future()
            await asyncio.shield(supervised.death)

    def is_coming_back(self, instance_id: str) -> bool:
        """Return whether an instance that is not serving may recover by itself."""
        supervised = self._supervised[instance_id]
        if supervised.health is Health.DEAD:
            return supervised.restart_at is not None
        # A rebuild passes through STALE shortly before the instance serves.
        return supervised.health in (Health.RESTARTING, Health.SUSPECT) or supervised.is_restarting

    async def with_liveness_check(self, instance_ids: Collection[str], work: Awaitable[T]) -> T:
        """Await work on instances that are not probed yet, such as loading a model.

        There is no time limit: the work is cancelled only when an instance stops answering probes.
        Before start, nothing is probed.

        Raises:
            InstanceLostError: If one of the instances stops answering probes.
            Exception: The error of ``work``.
        """
        if self._watch is None:
            return await work
        working = asyncio.ensure_future(work)
        silent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        # Only silence counts: an instance that has died or not started yet fails the work itself.
        def on_report(
            report: Report,
        ) -> None:
            if report.sign is Sign.DEAD and report.error is None and not silent.done():
                silent.set_result(report)

        watch = Watch(self._monitor, self._policy, on_report, instance_ids)
        try:
            await asyncio.wait([working, silent], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _lost(silent.result())
            return working.result()
        finally:
            watch.close()
            working.cancel()

    def _on_report(self, report: Report) -> None:
        id_, health = report.worker_id, report.health
        if health is not None:
            name = self._engine_name or id_
            failure = health.failure or health.failed_engines.get(name)
            if name not in health.engines:
                failure = failure or f"another role has restarted its worker, without {name!r}"
            if failure:
                report = report._replace(sign=Sign.DEAD, reason=failure)
        if report.notice is not None:
            self._leave(id_, report.notice)
        elif report.sign is Sign.DEAD:
            self.note(id_, HealthEvent.LOST, _lost(report))
        else:
            self.note(
                id_, HealthEvent.ANSWERED if report.sign is Sign.ANSWERED else HealthEvent.LATE
            )

    def _leave(self, instance_id: str, notice: PreemptionNotice) -> None:
        supervised = self._supervised[instance_id]
        if supervised.heeded is not notice and (
            supervised.moving is None or supervised.moving.done()
        ):
            supervised.heeded = notice
            log.warning(
                "%s is being drained: %s; its requests continue on other instances",
                instance_id,
                notice.reason,
            )
            supervised.moving = asyncio.create_task(
                self._move(instance_id, supervised, notice.reason)
            )

    async def _move(self, instance_id: str, supervised: _Supervised, reason: str) -> None:
        try:
            drain = await self._requests.drain(instance_id, migrate=True)
        except HelmsmanError as error:
            log.warning("%s could not be drained: %s", instance_id, error)
            return
        if supervised.health.is_alive:  # It may have died during the drain.
            self.note(
                instance_id,
                HealthEvent.EVACUATED,
                InstanceLostError(instance_id=instance_id, reason=reason, may_have_begun=False),
            )
        self._requests.undrain(instance_id, drain)

    async def _restart(self, instance_id: str, supervised: _Supervised) -> None:
        """Rebuild an instance until that succeeds or its budget is spent."""

        async def rebuild() -> None:
            # No await after this one: a newer weight version could be served in between.
            has_weights = await self._rebuild(instance_id)
            if supervised.health is Health.RESTARTING:  # It may have died again.
                self.note(instance_id, HealthEvent.RESTARTED)
                if has_weights:
                    self.note(instance_id, HealthEvent.UPDATED)

        while (due := supervised.restart_at) is not None:
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            supervised.restart_at = None
            self.note(instance_id, HealthEvent.RESTART)
            try:
                await self.with_liveness_check([instance_id], rebuild())
            # A rebuild may raise any error; each means that the instance is lost.
            except Exception as error:  # noqa: BLE001
                log.warning("%s could not be rebuilt: %s", instance_id, error)
                self.note(instance_id, HealthEvent.LOST, error)


def _lost(report: Report) -> InstanceLostError:
    reason = str(report.error) if report.error is not None else report.reason
    lost = InstanceLostError(instance_id=report.worker_id, reason=reason, may_have_begun=True)
    lost.__cause__ = report.error
    return lost
