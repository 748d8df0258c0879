"""Watches instances: probes them, gives up those that are silent, leaves those that are to go, has dead ones built anew.

What follows from what is health.py's; here are only the clock, the questions and the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.controller._generation.health import Event, Health, SupervisionPolicy, Watched
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._roles.call_all import observe

T = TypeVar("T")

log = logging.getLogger(__name__)

_MOST_TICK_S = 0.5


class Supervisor:
    """The health of a GenerateScheduler's instances, whoever brings the news.

    Args:
        requests: told of every change.
        policy: limits in seconds.
        probe: asks an instance whether it lives; raises InstanceLostError when it does not. Returns whether it is busy: it
            cannot answer, but was seen to compute. Silence is judged here.
        rebuild: ends what is left of an instance, builds it anew, and brings it the weights that are served; raises when it
            cannot. Returns whether it has the weights, or has to wait for the next update.
        leaving: which instances are about to go, and why, as part of a sentence. Such a one is drained, with its requests
            continued elsewhere, and then rebuilt, if possible at another place. An instance that is rebuilt at the same place,
            and reported as leaving again, goes on serving.
    """

    def __init__(
        self,
        requests: GenerateScheduler,
        policy: SupervisionPolicy,
        probe: Callable[[str], Awaitable[bool]],
        rebuild: Callable[[str], Awaitable[bool]],
        leaving: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        self.policy = policy
        self._requests, self._probe, self._rebuild, self._leaving = requests, probe, rebuild, leaving
        self._watched: dict[str, Watched] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._rebuilding: dict[str, asyncio.Task[None]] = {}
        self._moving: dict[str, asyncio.Task[None]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        """The one question at a time for those that are about to go."""
        self._left: dict[str, str] = {}
        """Why instances were left, while that is still said of them."""
        self._mourners: dict[str, list[asyncio.Future[None]]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        requests.on_lost(lambda instance_id, error: self.note(instance_id, Event.LOST, error))

    def watch(self, instance_id: str, health: Health = Health.HEALTHY) -> None:
        """Watch one more instance, which the scheduler serves by."""
        self._watched[instance_id] = Watched(self.policy, self._now(), health)

    def forget(self, instance_id: str) -> None:
        """Watch an instance no more."""
        self._watched.pop(instance_id, None)
        for tasks in (self._probes, self._rebuilding, self._moving):
            if (task := tasks.pop(instance_id, None)) is not None:
                task.cancel()
        self._tell_mourners(instance_id)

    def start(self) -> None:
        """Begin to probe and to rebuild; without it, only what others tell counts."""
        self._loop_task = asyncio.get_running_loop().create_task(self._run())
        observe(self._loop_task, "the supervision of rollout instances")

    def stop(self) -> None:
        """Ask nothing more and rebuild nothing more. Idempotent."""
        for tasks in (self._probes, self._rebuilding, self._moving, self._looking):
            for task in tasks.values():
                task.cancel()
        if self._loop_task is not None:
            self._loop_task.cancel()

    def note(self, instance_id: str, event: Event, error: Exception | None = None) -> None:
        """Take news of an instance in."""
        watched = self._watched.get(instance_id)
        if watched is None:
            return
        before = watched.health
        after = watched.on(event, self._now())
        if after is Health.DEAD:
            if (probe := self._probes.pop(instance_id, None)) is not None:
                probe.cancel()
            self._tell_mourners(instance_id)
        if after is not before:
            log.info("%s: %s after %s", instance_id, after.value, event.value)
            self._requests.set_health(instance_id, after, error)
            if after is Health.DEAD and self._loop_task is not None and watched.restart_at(self._now()) is None:
                num_others = sum(each.health is not Health.DEAD for each in self._watched.values())
                log.warning("%s stays dead, as its restarts are used up; %d instances go on", instance_id, num_others)

    async def until_dead(self, instance_id: str) -> None:
        """Return when an instance dies, is given up or is forgotten, from now on; at once when it is not watched."""
        if instance_id not in self._watched:
            return
        mourner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._mourners.setdefault(instance_id, [])
        waiting.append(mourner)
        try:
            await mourner
        finally:
            waiting.remove(mourner)

    def _tell_mourners(self, instance_id: str) -> None:
        for mourner in self._mourners.pop(instance_id, ()):
            if not mourner.done():
                mourner.set_result(None)

    def is_coming_back(self, instance_id: str) -> bool:
        """Whether an instance that does not serve is being built anew, or will be."""
        watched = self._watched[instance_id]
        if self._loop_task is None:
            return False
        waits = watched.health is Health.DEAD and watched.restart_at(self._now()) is not None
        # While it is being built anew, it is stale for a moment before it serves.
        return waits or watched.health in (Health.RESTARTING, Health.SUSPECT) or instance_id in self._rebuilding

    async def while_they_answer(self, instance_ids: Collection[str], work: Awaitable[T]) -> T:
        """Await what is done to instances that are not probed yet, such as the loading of a model, for however long it takes.

        Raises: what ``work`` raises; after start, InstanceLostError when one of them hangs meanwhile, as probes are answered
            beside it.
        """
        if self._loop_task is None:
            return await work
        working = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([working], timeout=self.policy.probe_every_s))[0]:
                await asyncio.gather(*map(self._require_answer, instance_ids))
            return working.result()
        finally:
            working.cancel()

    async def _require_answer(self, instance_id: str) -> None:
        watched = Watched(self.policy, self._now())
        watched.asked(self._now())
        while True:
            try:
                is_busy = await asyncio.wait_for(self._probe(instance_id), self.policy.dead_s)
            except TimeoutError as error:
                raise self._silent(instance_id, watched) from error
            except Exception as error:  # noqa: BLE001 - its process is not there yet, or what is done to it fails by this, too
                log.debug("%s: a probe failed while it is built: %s", instance_id, error)
                return
            if not is_busy:
                return
            watched.busy(self._now())
            if watched.passed_limit(self._now()):
                raise self._silent(instance_id, watched)
            await asyncio.sleep(self.policy.probe_every_s)

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _run(self) -> None:
        tick_s = min(_MOST_TICK_S, self.policy.probe_every_s / 2)
        look_at = self._now()
        while True:
            now = self._now()
            if self._leaving is not None and now >= look_at and not self._looking:
                look_at = now + self.policy.probe_every_s
                self._keep(self._looking, "", self._look(self._leaving))
            for instance_id, watched in list(self._watched.items()):
                if (event := watched.overdue(now)) is not None:
                    self.note(instance_id, event, self._silent(instance_id, watched) if event is Event.LOST else None)
                if watched.should_probe(now):
                    watched.asked(now)
                    self._keep(self._probes, instance_id, self._ask(instance_id))
                due = watched.restart_at(now)
                if due is not None and due <= now and instance_id not in self._rebuilding:
                    self.note(instance_id, Event.RESTART)
                    self._keep(self._rebuilding, instance_id, self._build(instance_id))
            await asyncio.sleep(tick_s)

    def _silent(self, instance_id: str, watched: Watched) -> InstanceLostError:
        limit = watched.passed_limit(self._now()) or "dead_s"
        reason = f"it has not answered a probe for {getattr(self.policy, limit):g} s (SupervisionPolicy.{limit})"
        return InstanceLostError(instance_id=instance_id, reason=reason, may_have_begun=True)

    def _keep(self, tasks: dict[str, asyncio.Task[None]], instance_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = tasks[instance_id] = asyncio.get_running_loop().create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            if tasks.get(instance_id) is task:
                del tasks[instance_id]

        task.add_done_callback(ended)

    async def _ask(self, instance_id: str) -> None:
        try:
            while await self._probe(instance_id):
                if (watched := self._watched.get(instance_id)) is not None:
                    watched.busy(self._now())
                await asyncio.sleep(self.policy.probe_every_s)
        except InstanceLostError as error:
            self.note(instance_id, Event.LOST, error)
        except Exception as error:  # noqa: BLE001 - a probe that fails otherwise is an answer that did not come
            log.debug("%s: a probe failed: %s", instance_id, error)
        else:
            self.note(instance_id, Event.ANSWERED)

    async def _look(self, ask: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
        try:
            leaving = await ask()
        except Exception as error:  # noqa: BLE001 - whoever knows is away for a moment; what goes without notice is noticed, too
            log.debug("it could not be asked which instances are about to go: %s", error)
            return
        self._left = {instance_id: reason for instance_id, reason in self._left.items() if leaving.get(instance_id) == reason}
        for instance_id, reason in leaving.items():
            watched = self._watched.get(instance_id)
            is_news = instance_id not in self._left and instance_id not in self._moving
            if is_news and watched is not None and watched.health.lives:
                self._left[instance_id] = reason
                log.warning("%s is left, since %s; its requests go on elsewhere", instance_id, reason)
                self._keep(self._moving, instance_id, self._move(instance_id, watched, reason))

    async def _move(self, instance_id: str, watched: Watched, reason: str) -> None:
        try:
            drain = await self._requests.drain(instance_id, migrate=True)
        except HelmsmanError as error:
            log.warning("%s is not left: %s", instance_id, error)
            return
        if watched.health.lives:  # it may have died meanwhile
            self.note(instance_id, Event.LEFT, InstanceLostError(instance_id=instance_id, reason=reason, may_have_begun=False))
        self._requests.undrain(instance_id, drain)

    async def _build(self, instance_id: str) -> None:
        async def rebuild() -> None:
            has_weights = await self._rebuild(instance_id)  # and no await from here on, or others could be served meanwhile
            if self._watched[instance_id].health is not Health.RESTARTING:
                return  # it has died again meanwhile
            self.note(instance_id, Event.RESTARTED)
            if has_weights:
                self.note(instance_id, Event.UPDATED)

        try:
            await self.while_they_answer([instance_id], rebuild())
        except Exception as error:  # noqa: BLE001 - whatever it is, the instance is not there, and the budget decides
            log.warning("%s could not be built anew: %s", instance_id, error)
            self.note(instance_id, Event.LOST, error)
