"""The supervisor leaves instances that are about to go, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.controller._generation.health import Health, SupervisionPolicy
from helmsman.controller._generation.request import RequestState
from helmsman.controller._generation.scheduler import GenerateScheduler
from helmsman.controller._generation.supervisor import Supervisor
from helmsman.testing import run_virtually

POLICY = SupervisionPolicy(probe_every_s=1.0, suspect_s=5.0, dead_s=10.0, max_restarts=1)


class Cluster:
    """Instances that generate a token a second, some of which are about to go."""

    def __init__(self) -> None:
        self.leaving: dict[str, str] = {}
        self.moves_away = True
        self.rebuilt: list[str] = []
        self.fails = False
        self.aborted: dict[str, asyncio.Event] = {}

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """All its tokens, or those until it is aborted."""
        event = self.aborted[request.request_id] = asyncio.Event()
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_new_tokens and not event.is_set():
            await asyncio.sleep(1.0)
            tokens.append(len(request.prompt_ids) + len(tokens))
        return GenerationResult(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=[0.0] * len(tokens),
            versions=[0] * len(tokens),
            stop_reason="abort" if event.is_set() else "length",
        )

    async def abort(self, instance_id: str, request_ids: list[str]) -> None:
        """End these requests at their next token."""
        for request_id in request_ids:
            self.aborted[request_id].set()

    async def probe(self, instance_id: str) -> bool:
        """All are well."""
        return False

    async def rebuild(self, instance_id: str) -> bool:
        """Build it anew, elsewhere where that can be."""
        self.rebuilt.append(instance_id)
        if self.fails:
            raise RuntimeError("there is no room")
        if self.moves_away:
            self.leaving.pop(instance_id, None)
        return True

    async def ask(self) -> Mapping[str, str]:
        """Which are about to go; a dictionary that changes later, as a look at a cluster does not."""
        return dict(self.leaving)


def _supervised(cluster: Cluster) -> tuple[GenerateScheduler, Supervisor]:
    requests = GenerateScheduler(cluster)  # type: ignore[arg-type]
    supervisor = Supervisor(requests, POLICY, cluster.probe, cluster.rebuild, cluster.ask)
    for instance_id in ("a", "b"):
        supervisor.watch(instance_id)
        requests.add(instance_id, 8)
    supervisor.start()
    return requests, supervisor


def _requests(count: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=20)
    return [GenerationRequest(request_id=f"r{index}", prompt_ids=[1, 2], sampling=sampling) for index in range(count)]


def test_each_notice_is_heeded_once_and_costs_no_restart_of_the_budget() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        requests, supervisor = _supervised(cluster)
        tickets = requests.put(_requests(4))
        await asyncio.sleep(5.5)
        for number in range(3):
            cluster.leaving = {"a": f"notice {number}"}
            await asyncio.sleep(4.0)
            assert cluster.rebuilt == ["a"] * (number + 1)
            assert requests.instances["a"].health is Health.HEALTHY
            assert not requests.instances["a"].is_draining
        await requests.wait_idle()
        assert {ticket.state for ticket in tickets} == {RequestState.DONE}
        assert [ticket.future.result().token_ids for ticket in tickets] == [list(range(2, 22))] * 4
        supervisor.stop()

    run_virtually(scenario())


def test_one_that_cannot_be_built_elsewhere_serves_on_until_it_goes() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.moves_away = False
        requests, supervisor = _supervised(cluster)
        cluster.leaving = {"a": "its node is being drained"}
        await asyncio.sleep(60.0)
        assert cluster.rebuilt == ["a"], "leaving it again and again would help nobody"
        assert requests.instances["a"].serves
        cluster.leaving = {}
        await asyncio.sleep(5.0)
        cluster.leaving = {"a": "its node is being drained"}
        await asyncio.sleep(5.0)
        assert cluster.rebuilt == ["a", "a"], "another notice"
        supervisor.stop()

    run_virtually(scenario())


def test_where_there_is_no_room_the_budget_ends_the_attempts() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.fails = True
        requests, supervisor = _supervised(cluster)
        cluster.leaving = {"a": "its node is being drained"}
        await asyncio.sleep(60.0)
        assert cluster.rebuilt == ["a", "a"], "the one in time, and the one of the budget"
        assert requests.instances["a"].health is Health.DEAD
        (ticket,) = requests.put(_requests(1))
        await requests.wait_idle()
        assert ticket.sent_to == "b"
        supervisor.stop()

    run_virtually(scenario())


def test_one_that_is_removed_while_it_is_left_is_gone() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        requests, supervisor = _supervised(cluster)
        requests.put(_requests(4))
        await asyncio.sleep(0.5)
        cluster.leaving = {"a": "its node is being drained"}
        await requests.drain("a", migrate=True)
        requests.remove("a")
        supervisor.forget("a")
        await requests.wait_idle()
        await asyncio.sleep(5.0)
        assert cluster.rebuilt == []
        assert list(requests.instances) == ["b"]
        supervisor.stop()

    run_virtually(scenario())


def test_nobody_waits_for_the_death_of_one_that_was_removed() -> None:
    async def scenario() -> None:
        requests, supervisor = _supervised(Cluster())
        before = asyncio.ensure_future(supervisor.until_dead("a"))
        await asyncio.sleep(5.0)
        assert not before.done()
        requests.remove("a")
        supervisor.forget("a")
        await before
        await supervisor.until_dead("a")
        supervisor.stop()

    run_virtually(scenario())
