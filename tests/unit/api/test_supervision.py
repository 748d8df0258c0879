"""Test a monitor and its watches on a virtual clock, and the budget of restarts."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from helmsman.api.errors import CallTimeoutError, WorkerNotFoundError
from helmsman.api.scheduler import PreemptionNotice, WorkerHealth
from helmsman.api.supervision import Monitor, ProbePolicy, Report, RestartBudget, Sign, Watch
from tests.controller.fakes import make_death
from tests.unit.controller.rollout.backends import virtually


class Probes(ProbePolicy, frozen=True, kw_only=True):
    """The policy of a controller; messages name it."""


POLICY = Probes(probe_every_s=2.0, dead_s=60.0, busy_s=300.0)
ANSWERED, SUSPECT, DEAD, PREEMPTED = Sign.ANSWERED, Sign.SUSPECT, Sign.DEAD, Sign.PREEMPTED


class Workers:
    """Workers in the states that a test sets, and the reports of a watch about them."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        """Process state by worker id; a worker without an entry answers."""
        self.errors: dict[str, Exception] = {}
        self.answers_after_s = 0.0
        self.num_probes = 0
        self.outstanding: set[str] = set()
        self.notices: dict[str, str] = {}
        self.reports: list[tuple[float, Report]] = []
        self.monitor = Monitor(self.check_health, self.leaving)

    async def check_health(self, worker_id: str, timeout: float | None = None) -> WorkerHealth:
        self.num_probes += 1
        assert worker_id not in self.outstanding, "at most one probe is in flight"
        self.outstanding.add(worker_id)
        await asyncio.sleep(self.answers_after_s)
        self.outstanding.discard(worker_id)
        if worker_id in self.errors:
            raise self.errors[worker_id]
        state = self.states.get(worker_id)
        stuck_s = None if state is None else 1.0
        return WorkerHealth(
            worker_id=worker_id,
            pid=1,
            node="",
            engines={},
            stuck_s=stuck_s,
            process_state=state,  # type: ignore[arg-type]
        )

    async def leaving(self) -> dict[str, PreemptionNotice]:
        return {
            worker_id: PreemptionNotice(reason=reason) for worker_id, reason in self.notices.items()
        }

    def note(self, report: Report) -> None:
        self.reports.append((asyncio.get_running_loop().time(), report))

    def signs(self) -> list[Sign]:
        return [report.sign for _, report in self.reports]


def probe_timeout() -> CallTimeoutError:
    return CallTimeoutError(
        worker_id="a",
        engine_name=None,
        method="health",
        elapsed_s=1.0,
        limit_s=1.0,
        limit_source="",
        worker_alive=False,
        state="",
        stack="",
    )


@virtually
async def test_watch_slow_answers() -> None:
    workers = Workers()
    workers.answers_after_s = 3.0
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"], suspect_s=10.0)
    await asyncio.sleep(14.5)
    assert [round(at) for at, _ in workers.reports] == [3, 8, 13]
    assert workers.signs() == [ANSWERED] * 3, "no slow answer makes it suspect"
    watch.close()
    await asyncio.sleep(100.0)
    assert (workers.num_probes, len(workers.reports)) == (3, 3)


@virtually
async def test_watch_silent_worker() -> None:
    workers = Workers()
    workers.states["a"] = "stopped"
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"], suspect_s=10.0)
    await asyncio.sleep(60.0 + 1.0)
    (suspect_at, suspect), (dead_at, dead) = workers.reports
    assert (round(suspect_at), suspect.sign) == (10, SUSPECT)
    assert dead_at == pytest.approx(60.0, abs=0.5)
    assert (dead.sign, dead.error, dead.reason) == (
        DEAD,
        None,
        "it has not answered for 60 s (Probes.dead_s)",
    )
    del workers.states["a"]
    await asyncio.sleep(5.0)
    assert workers.signs()[2:] == [ANSWERED] * 2, "a later answer is reported, too"
    watch.close()


@virtually
async def test_watch_answer_after_suspicion() -> None:
    workers = Workers()
    workers.errors["a"] = probe_timeout()
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"], suspect_s=10.0)
    await asyncio.sleep(40.0)
    del workers.errors["a"]
    await asyncio.sleep(1.0)
    assert workers.signs() == [SUSPECT, ANSWERED]
    watch.close()


@pytest.mark.parametrize("state", ["running", "disk"])
@virtually
async def test_watch_busy_worker(state: str) -> None:
    workers = Workers()
    workers.states["a"] = state
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"], suspect_s=10.0)
    await asyncio.sleep(299.0)
    assert workers.signs() == [SUSPECT]
    await asyncio.sleep(3.0)
    assert workers.reports[1][1].reason == "it has not answered for 300 s (Probes.busy_s)"
    watch.close()


@virtually
async def test_watch_silent_after_busy() -> None:
    workers = Workers()
    workers.states["a"] = "running"
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"])
    await asyncio.sleep(50.0)
    workers.states["a"] = "sleeping"
    await asyncio.sleep(59.0)
    assert DEAD not in workers.signs()
    await asyncio.sleep(4.0)
    assert workers.signs()[-1] is DEAD
    watch.close()


@virtually
async def test_watch_dead_worker_until_discarded() -> None:
    workers = Workers()
    watch = Watch(workers.monitor, POLICY, workers.note, ["a", "b"])
    workers.errors["a"] = death = make_death("a")
    await asyncio.sleep(3.0)
    assert [report.error for _, report in workers.reports if report.worker_id == "a"] == [
        death,
        death,
    ]
    watch.discard("a")
    watch.discard("a")
    workers.reports.clear()
    await asyncio.sleep(3.0)
    assert {report.worker_id for _, report in workers.reports} == {"b"}
    watch.close()


@virtually
async def test_watch_worker_not_found() -> None:
    workers = Workers()
    workers.errors["a"] = WorkerNotFoundError(name="a", known=[])
    watch = Watch(workers.monitor, POLICY, workers.note, ["a"])
    await asyncio.sleep(200.0)
    assert (workers.num_probes, workers.reports) == (100, [])
    watch.close()


@virtually
async def test_monitor_subscriber_raises(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers()

    def fail(report: Report) -> None:
        raise RuntimeError(f"no rule for {report.sign.value}")

    watch = Watch(workers.monitor, POLICY, fail, ["a"])
    Watch(workers.monitor, POLICY, workers.note, ["a"])
    workers.notices = {"a": "drained"}
    await asyncio.sleep(5.0)
    assert {report.sign for _, report in workers.reports} == {ANSWERED, PREEMPTED}
    assert "the subscriber failed on the report that a is preempted" in caplog.text
    workers.monitor.close()
    watch.add("b")
    await asyncio.sleep(0.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtually
async def test_watch_notices_identical_while_they_hold() -> None:
    workers = Workers()
    other: list[Report] = []
    watches = [
        Watch(workers.monitor, POLICY, subscriber, ["a"])
        for subscriber in (workers.note, other.append)
    ]
    for reason in ("drained", "drained", "drained by another", "", "drained"):
        workers.notices = {"a": reason, "b": "is not watched"} if reason else {}
        await asyncio.sleep(2.0)
    notices = [report.notice for _, report in workers.reports if report.sign is PREEMPTED]
    assert [notice.reason for notice in notices if notice] == [
        "drained",
        "drained",
        "drained by another",
        "drained",
    ]
    assert notices[0] is notices[1] is not notices[3]
    assert [report.notice for report in other if report.sign is PREEMPTED] == notices
    for watch in watches:
        watch.close()
        watch.close()


@pytest.mark.parametrize(
    ("state", "or_busy", "sign"),
    [
        (None, True, ANSWERED),
        ("running", True, Sign.BUSY),
        ("running", False, DEAD),
        ("stopped", True, DEAD),
    ],
)
@virtually
async def test_monitor_ask(state: str | None, or_busy: bool, sign: Sign) -> None:
    workers = Workers()
    workers.states = {} if state is None else {"a": state}
    report = await workers.monitor.ask("a", 5.0, or_busy=or_busy)
    assert (report.sign, round(asyncio.get_running_loop().time())) == (
        sign,
        5 if sign is DEAD else 0,
    )
    assert report.reason == ("it has not answered for 5 s" if sign is DEAD else "")


@virtually
async def test_monitor_ask_after_suspension() -> None:
    workers = Workers()
    loop = asyncio.get_running_loop()

    async def resumed_later(worker_id: str, timeout: float | None = None) -> WorkerHealth:
        workers.num_probes += 1
        if workers.num_probes == 1:
            await asyncio.sleep(500.0)
            raise probe_timeout()
        return await workers.check_health(worker_id)

    report = await Monitor(resumed_later, workers.leaving).ask("a", 5.0)
    assert (report.sign, loop.time()) == (ANSWERED, pytest.approx(500.0))


def test_restart_budget() -> None:
    budget = RestartBudget(3, window_s=100.0, pause_s=0.5)
    assert [budget.spend(now) for now in (0.0, 10.0, 20.0)] == [0.5, 1.0, 2.0]
    assert budget.spend(99.0) is None
    assert budget.num_recent(99.0) == 3
    assert (budget.free_in_s(99.0), budget.free_in_s(100.0)) == (1.0, 0.0)
    assert budget.spend(100.0) == 2.0, "the first restart has left the window"
    assert budget.spend(105.0) is None
    assert budget.spend(300.0) == 0.5
    assert RestartBudget(0, 1.0).spend(0.0) is None
    assert RestartBudget(0, 1.0).free_in_s(0.0) == math.inf


def test_restart_budget_is_free_after_the_wait() -> None:
    """Rounding would leave a wait too short to move the clock, again and again."""
    numbers = random.Random(0)
    for _ in range(10_000):
        budget = RestartBudget(1, window_s=600.0)
        budget.spend(begun := numbers.uniform(0.0, 1e4))
        now = begun + numbers.uniform(0.0, 600.0)
        for _ in range(2):
            now += budget.free_in_s(now)
        assert budget.spend(now) is not None, (begun, now)
