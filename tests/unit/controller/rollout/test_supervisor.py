"""Tests of Supervisor on a virtual clock: preemption notices, deaths and rebuilds."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api.errors import WorkerFailedError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.scheduler import PreemptionNotice, WorkerHealth
from helmsman.api.supervision import Monitor
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health, HealthEvent, SupervisionPolicy
from helmsman.controller._rollout.request import RequestState
from helmsman.controller._rollout.supervisor import Supervisor
from tests.controller.fakes import make_death
from tests.unit.controller.rollout.backends import make_requests, make_result, virtually

POLICY = SupervisionPolicy(probe_every_s=1.0, suspect_s=5.0, dead_s=10.0, max_restarts=1)

PREEMPTED = {"a": "its node is being drained"}


class Cluster:
    """Instances that generate one token per second, and that a test ends or preempts."""

    def __init__(self, moves_away: bool = True, fails: bool = False) -> None:
        self.leaving: dict[str, str] = {}
        """Instance id -> reason of its preemption."""
        self.moves_away = moves_away
        self.rebuilt: list[float] = []
        """Times of the rebuilds, in seconds."""
        self.fails = fails
        self.dead: dict[str, WorkerFailedError] = {}
        self.failed_engines: dict[str, str] = {}
        self.emptied: set[str] = set()
        """Instances whose worker another role has restarted."""
        self.aborted: dict[str, asyncio.Event] = {}

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """Return all tokens of a request, or those before its abort."""
        event = self.aborted[request.request_id] = asyncio.Event()
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_new_tokens and not event.is_set():
            await asyncio.sleep(1.0)
            tokens.append(len(request.prompt_ids) + len(tokens))
        return make_result(
            request.request_id, tokens, stop_reason="abort" if event.is_set() else "length"
        )

    async def abort(self, instance_id: str, request_ids: list[str]) -> None:
        """End these requests at their next token."""
        for request_id in request_ids:
            self.aborted[request_id].set()

    async def check_health(self, worker_id: str, timeout: float | None = None) -> WorkerHealth:
        if worker_id in self.dead:
            raise self.dead[worker_id]
        engines = {} if worker_id in self.emptied else {worker_id: "Engine"}
        return WorkerHealth(
            worker_id=worker_id, pid=1, node="", engines=engines, failed_engines=self.failed_engines
        )

    async def rebuild(self, instance_id: str) -> bool:
        """Record a rebuild, which may move the instance to another node."""
        self.rebuilt.append(asyncio.get_running_loop().time())
        if self.fails:
            raise RuntimeError("there is no room")
        if self.moves_away:
            self.leaving.pop(instance_id, None)
        self.dead.pop(instance_id, None)
        self.emptied.discard(instance_id)
        self.failed_engines = {}
        return True

    async def preemption_notices(self) -> dict[str, PreemptionNotice]:
        return {
            instance_id: PreemptionNotice(reason=reason)
            for instance_id, reason in self.leaving.items()
        }


def _supervised(
    cluster: Cluster, policy: SupervisionPolicy = POLICY
) -> tuple[GenerateScheduler, Supervisor]:
    requests = GenerateScheduler(cluster)  # type: ignore[arg-type]
    supervisor = Supervisor(
        requests, policy, Monitor(cluster.check_health, cluster.preemption_notices), cluster.rebuild
    )
    for instance_id in ("a", "b"):
        supervisor.watch(instance_id)
        requests.add(instance_id, 8)
    supervisor.start()
    return requests, supervisor


@virtually
async def test_notice_is_handled_once() -> None:
    cluster = Cluster()
    requests, _ = _supervised(cluster)
    tickets = requests.put(make_requests(4, prompt=[1, 2], max_new_tokens=20))
    await asyncio.sleep(5.5)
    for number in range(3):
        cluster.leaving = {"a": f"notice {number}"}
        await asyncio.sleep(4.0)
        assert len(cluster.rebuilt) == number + 1
        assert requests.instances["a"].health is Health.HEALTHY
        assert not requests.instances["a"].is_draining
    await requests.wait_idle()
    assert {ticket.state for ticket in tickets} == {RequestState.DONE}
    assert [ticket.future.result().token_ids for ticket in tickets] == [list(range(2, 22))] * 4


@virtually
async def test_notice_without_another_node() -> None:
    cluster = Cluster(moves_away=False)
    requests, _ = _supervised(cluster)
    cluster.leaving = dict(PREEMPTED)
    await asyncio.sleep(60.0)
    assert len(cluster.rebuilt) == 1, "one rebuild for one notice"
    assert requests.instances["a"].is_serving
    cluster.leaving = {}
    await asyncio.sleep(5.0)
    cluster.leaving = dict(PREEMPTED)
    await asyncio.sleep(5.0)
    assert len(cluster.rebuilt) == 2, "one rebuild for a new notice"


@virtually
async def test_notice_and_rebuild_that_fails() -> None:
    cluster = Cluster(fails=True)
    requests, _ = _supervised(cluster)
    cluster.leaving = dict(PREEMPTED)
    await asyncio.sleep(60.0)
    assert len(cluster.rebuilt) == 2, "one rebuild for the notice, and one restart of the budget"
    assert requests.instances["a"].health is Health.DEAD
    (ticket,) = requests.put(make_requests(1))
    await requests.wait_idle()
    assert ticket.sent_to == "b"


@virtually
async def test_forget_of_a_removed_instance() -> None:
    cluster = Cluster()
    requests, supervisor = _supervised(cluster)
    requests.put(make_requests(4, prompt=[1, 2], max_new_tokens=20))
    await asyncio.sleep(0.5)
    cluster.leaving = dict(PREEMPTED)
    await requests.drain("a", migrate=True)
    requests.remove("a")
    supervisor.forget("a")
    await requests.wait_idle()
    await asyncio.sleep(5.0)
    assert cluster.rebuilt == []
    assert list(requests.instances) == ["b"]


@virtually
async def test_until_dead_of_a_removed_instance() -> None:
    requests, supervisor = _supervised(Cluster())
    before = asyncio.ensure_future(supervisor.until_dead("a"))
    await asyncio.sleep(5.0)
    assert not before.done()
    requests.remove("a")
    supervisor.forget("a")
    await before
    await supervisor.until_dead("a")


@virtually
async def test_restart_pauses_double_within_the_budget() -> None:
    cluster = Cluster()
    requests, supervisor = _supervised(
        cluster, SupervisionPolicy(probe_every_s=1.0, restart_pause_s=4.0)
    )
    for number, pause_s in enumerate((4.0, 8.0, 16.0)):
        cluster.dead["a"] = make_death("a")
        await supervisor.until_dead("a")
        died_at = asyncio.get_running_loop().time()
        assert (requests.instances["a"].health, supervisor.is_coming_back("a")) == (
            Health.DEAD,
            True,
        )
        await asyncio.sleep(pause_s + 0.1)
        assert cluster.rebuilt[number:] == [pytest.approx(died_at + pause_s)]
        assert requests.instances["a"].health is Health.HEALTHY
    cluster.dead["a"] = make_death("a")
    await supervisor.until_dead("a")
    assert not supervisor.is_coming_back("a")
    await asyncio.sleep(1000.0)
    assert len(cluster.rebuilt) == 3
    await asyncio.sleep(3600.0)
    assert len(cluster.rebuilt) == 4, "a restart has left the window"
    assert requests.instances["a"].health is Health.HEALTHY


@virtually
async def test_watch_of_a_dead_instance() -> None:
    cluster = Cluster()
    _, supervisor = _supervised(cluster)
    cluster.dead["a"] = make_death("a")
    await supervisor.until_dead("a")
    supervisor.forget("a")
    supervisor.watch("a", Health.DEAD)
    await asyncio.sleep(5.0)
    assert len(cluster.rebuilt) == 1


@virtually
async def test_stop_prevents_rebuilds() -> None:
    cluster = Cluster()
    _, supervisor = _supervised(cluster)
    supervisor.stop()
    supervisor.note("a", HealthEvent.LOST)
    await asyncio.sleep(5000.0)
    assert not cluster.rebuilt


@virtually
async def test_failed_engine_is_rebuilt() -> None:
    cluster = Cluster()
    requests, supervisor = _supervised(cluster)
    cluster.failed_engines = {"a": "its server has ended"}
    await supervisor.until_dead("a")
    assert str(requests.instances["a"].error).count("its server has ended") == 1
    assert requests.instances["b"].is_serving
    await asyncio.sleep(5.0)
    assert requests.instances["a"].is_serving


@virtually
async def test_engine_that_is_gone_is_rebuilt() -> None:
    cluster = Cluster()
    requests, supervisor = _supervised(cluster)
    cluster.emptied.add("a")
    await supervisor.until_dead("a")
    assert "another role has restarted its worker" in str(requests.instances["a"].error)
    assert requests.instances["b"].is_serving
    await asyncio.sleep(5.0)
    assert requests.instances["a"].is_serving


@virtually
async def test_dead_instance_is_not_probed() -> None:
    cluster = Cluster()
    requests, supervisor = _supervised(
        cluster, SupervisionPolicy(probe_every_s=1.0, max_restarts=0)
    )
    cluster.dead["a"] = make_death("a")
    await supervisor.until_dead("a")
    cluster.dead.clear()
    await asyncio.sleep(100.0)
    assert (requests.instances["a"].health, requests.instances["b"].health) == (
        Health.DEAD,
        Health.HEALTHY,
    )
