"""Tests of RolloutController: routing, bounds, failures and weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helmsman._base.event_loop import background_loop
from helmsman.api.errors import EngineCallError, GroupCallError, HelmsmanError, WorkerFailedError
from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.api.scheduler import Job
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.controller.engines import CountingRollout
from tests.controller.fakes import FakeScheduler
from tests.unit.controller.rollout.fake_rollout import (
    LIMIT_S,
    Gated,
    engine,
    finish,
    settle,
    started,
    submit_all,
)

# --- order, routing, bounds -----------------------------------------------------------------------


def test_generate_keeps_the_order_of_prompts(scheduler: FakeScheduler) -> None:
    with started(scheduler, 3, CountingRollout, max_in_flight_per_worker=2) as rollout:
        prompts = [[10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(40)]
        sampling = [SamplingParams(max_new_tokens=1 + i % 3) for i in range(40)]
        results = rollout.generate(prompts, sampling)
        assert [r.token_ids for r in results] == [
            [t + 1 for t in p][: 1 + i % 3] for i, p in enumerate(prompts)
        ]
        assert len({r.request_id for r in results}) == 40
        assert rollout.generate([]) == []
        assert [engine(scheduler, i).most_at_once <= 2 for i in range(3)] == [True] * 3
        assert sorted(id_ for i in range(3) for id_ in engine(scheduler, i).served) == sorted(
            r.request_id for r in results
        )


def test_submit_prefers_fewest_outstanding_tokens(scheduler: FakeScheduler) -> None:
    with started(scheduler, 3) as rollout:
        submit_all(rollout, [[1] * 50, [1] * 10, [1] * 20], max_new_tokens=5)
        assert [load.outstanding_tokens for load in rollout.stats().instances.values()] == [
            55,
            15,
            25,
        ]
        submit_all(rollout, [[1] * 10, [1] * 2], max_new_tokens=5)
        assert [engine(scheduler, i).served for i in range(3)] == [
            ["rollout-0"],
            ["rollout-1", "rollout-3"],
            ["rollout-2", "rollout-4"],
        ]
        finish(scheduler, 0)
        assert rollout.stats().instances["rollout/0"].outstanding_tokens == 0
        for i in (1, 2):
            finish(scheduler, i)


# --- arguments ------------------------------------------------------------------------------------


def test_requests_refuse_invalid_arguments(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1) as rollout:
        num_sent = len(scheduler.sent)
        request = GenerationRequest(request_id="mine", prompt_ids=[1])
        with pytest.raises(ValueError, match="prompt 1 is empty; expected at least one token id"):
            rollout.generate([[1], []])
        with pytest.raises(
            ValueError,
            match="prompt 0 is of type str; expected its token ids, or a GenerationRequest",
        ):
            rollout.generate(["why?"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="prompt 0 is of type int; expected its token ids"):
            rollout.generate([1, 2])  # type: ignore[list-item]
        with pytest.raises(
            ValueError,
            match=r"request_ids is 'mine'; expected a sequence of ids, such as \['mine'\]",
        ):
            rollout.abort("mine")
        with pytest.raises(ValueError, match="worker_ids is 'rollout/0'"):
            rollout.drain("rollout/0")
        with pytest.raises(ValueError, match="3 sampling parameters for 2 prompts"):
            rollout.generate([[1], [2]], [SamplingParams()] * 3)
        with pytest.raises(ValueError, match="sampling parameters of its own"):
            rollout.submit(request, SamplingParams())
        with pytest.raises(ValueError, match="request id 'mine' is in use already"):
            rollout.generate([request, request])
        assert len(scheduler.sent) == num_sent
        future = rollout.submit(request)
        with pytest.raises(ValueError, match="request id 'mine' is in use already"):
            rollout.submit(request)
        finish(scheduler, 0)
        assert future.result(LIMIT_S).request_id == "mine"
        again = rollout.submit(request)  # the id is free again
        finish(scheduler, 0)
        assert again.result(LIMIT_S).token_ids == [2]


def test_controller_refuses_invalid_bounds_and_early_use(scheduler: FakeScheduler) -> None:
    with pytest.raises(ValueError, match="max_in_flight_per_worker is 0; expected 1 or more"):
        RolloutController(scheduler, Gated, Job(role="rollout"), max_in_flight_per_worker=0)
    with pytest.raises(ValueError, match="max_queue is 0; expected 1 or more"):
        RolloutController(scheduler, Gated, Job(role="rollout"), max_queue=0)
    with pytest.raises(
        HelmsmanError, match=r"not started; use it in a `with` .* initialize\(\) first"
    ):
        RolloutController(scheduler, Gated, Job(role="rollout")).generate([[1]])


def test_controller_with_statement_starts_and_closes(scheduler: FakeScheduler) -> None:
    job = Job(role="rollout")
    with RolloutController(scheduler, CountingRollout, job) as rollout:
        rollout.initialize()
        assert scheduler.methods("rollout/0").count("__init__") == 1, (
            "the second start does nothing"
        )
        assert len(rollout.generate([[1], [2]], num_samples=2)) == 4
        assert rollout.generate_one([1]).token_ids
        assert len(rollout.generate_samples([1], 3)) == 3
        assert rollout.stats().num_queued == 0
    assert scheduler.jobs == {}
    with pytest.raises(HelmsmanError, match="is closed; make a new one"):
        rollout.initialize()


async def test_controller_async_with_starts_and_closes(scheduler: FakeScheduler) -> None:
    async with RolloutController(scheduler, CountingRollout, Job(role="rollout")) as rollout:
        assert len(await rollout.async_generate([[1], [2]], num_samples=2)) == 4
        assert (await rollout.async_stats()).num_queued == 0
        assert set(await rollout.async_versions()) == {"rollout/0"}
    assert scheduler.jobs == {}


def test_controller_with_statement_cleans_up_a_failed_start(
    scheduler: FakeScheduler,
) -> None:
    class Broken(CountingRollout):
        def __init__(self) -> None:
            raise OSError("no model there")

    with (
        pytest.raises(HelmsmanError, match="no model there"),
        RolloutController(scheduler, Broken, Job(role="rollout")),
    ):
        pytest.fail("the controller has not started")
    assert scheduler.jobs == {}


# --- abort, pause, cancel -------------------------------------------------------------------------


def test_generate_one_cancelled_withdraws_the_request(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1, max_in_flight_per_worker=1) as rollout:
        running, waiting = (
            asyncio.run_coroutine_threadsafe(rollout.async_generate_one([1]), background_loop())
            for _ in range(2)
        )
        settle()
        for future in (waiting, running):
            future.cancel()
        settle()
        assert engine(scheduler, 0).running == {}
        assert engine(scheduler, 0).served == ["rollout-0"]
        assert scheduler.methods("rollout/0").count("abort") == 1
        load = rollout.stats()
        assert (load.num_queued, load.instances["rollout/0"].outstanding_tokens) == (0, 0)


# --- failures -------------------------------------------------------------------------------------


def test_death_fails_only_requests_of_the_worker(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, max_in_flight_per_worker=2) as rollout:
        # 0 and 2 on the first worker, 1 and 3 on the second, 4 and 5 wait
        futures = submit_all(rollout, [[1]] * 6)
        scheduler.kill("rollout/0")
        for index in (0, 2):
            with pytest.raises(WorkerFailedError, match="rollout/0"):
                futures[index].result(LIMIT_S)
        settle()
        assert rollout.stats().instances["rollout/0"].state is Health.DEAD
        while not all(future.done() for future in futures):
            finish(scheduler, 1)
        assert [futures[i].result().request_id for i in (1, 3, 4, 5)] == [
            f"rollout-{i}" for i in (1, 3, 4, 5)
        ]
        assert engine(scheduler, 0).served == ["rollout-0", "rollout-2"]
        assert engine(scheduler, 1).served == ["rollout-1", "rollout-3", "rollout-4", "rollout-5"]
        assert rollout.versions() == {"rollout/1": 0}
        assert rollout.update_weights({"weight": []}, 3) == 3
        assert scheduler.methods("rollout/0").count("update_weights") == 0


@pytest.mark.parametrize(("replicas", "failure"), [(1, WorkerFailedError), (2, GroupCallError)])
def test_death_of_all_fails_every_request(
    scheduler: FakeScheduler, replicas: int, failure: type[HelmsmanError]
) -> None:
    with started(scheduler, replicas, max_in_flight_per_worker=1) as rollout:
        *running, waiting = submit_all(rollout, [[1]] * (replicas + 1))
        for index in range(replicas):
            scheduler.kill(f"rollout/{index}")
        for future in running:
            with pytest.raises(WorkerFailedError):
                future.result(LIMIT_S)
        message = "failed on 2 of 2 ranks" if replicas > 1 else "rollout/0"
        for call in (
            lambda: waiting.result(LIMIT_S),
            lambda: rollout.submit([1]),
            rollout.versions,
        ):
            with pytest.raises(failure, match=message):
                call()
        assert rollout.stats().num_queued == 0


def test_generate_failure_aborts_the_rest(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, max_in_flight_per_worker=2) as rollout:
        other = submit_all(rollout, [[5]])[0]
        with pytest.raises(GroupCallError, match="token 0 is no prompt") as caught:
            rollout.generate([[1], [2], [0], [3], [4], [5]])
        assert isinstance(caught.value.first, EngineCallError)
        settle()
        assert not other.done()
        assert [list(engine(scheduler, i).running) for i in range(2)] == [["rollout-0"], []]
        assert rollout.stats().num_queued == 0
        finish(scheduler, 0)
        assert other.result(LIMIT_S).stop_reason == "length"
        assert {load.state for load in rollout.stats().instances.values()} == {Health.HEALTHY}


# --- weights --------------------------------------------------------------------------------------


class Sticks(CountingRollout):
    """Ignores weights on the second worker while ``sticks`` is set."""

    sticks = True

    async def update_weights(self, weights: Any, version: int) -> int:
        if self.sticks and self.worker_id == "rollout/1":
            weights = {"weight": "stuck"}
        return await super().update_weights(weights, version)


def test_update_weights_stale_worker_serves_nothing(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, Sticks) as rollout:
        with pytest.raises(
            GroupCallError, match="rollout/1 serves weight version 0 after an update to 1"
        ):
            rollout.update_weights({"weight": []}, 1)
        assert [i.state for i in rollout.stats().instances.values()] == [
            Health.HEALTHY,
            Health.STALE,
        ]
        assert {v for result in rollout.generate([[1]] * 6) for v in result.versions} == {1}
        assert engine(scheduler, 1).served == []
        engine(scheduler, 1).sticks = False  # type: ignore[attr-defined]
        assert rollout.update_weights({"weight": []}, 2) == 2
        assert rollout.versions() == {"rollout/0": 2, "rollout/1": 2}
        rollout.generate([[1]] * 6)
        assert len(engine(scheduler, 1).served) == 3
        assert [engine(scheduler, i).num_updates for i in range(2)] == [2, 2]


def test_update_weights_refused_by_all(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1, max_in_flight_per_worker=1) as rollout:
        futures = submit_all(rollout, [[1]] * 2)
        with pytest.raises(EngineCallError, match="KeyError"):
            rollout.update_weights({}, 1)
        with pytest.raises(EngineCallError, match="KeyError"):
            futures[1].result(LIMIT_S)
        with pytest.raises(EngineCallError, match="KeyError"):
            rollout.generate([[1]])
        finish(scheduler, 0)  # the running request keeps its weights
        assert futures[0].result(LIMIT_S).versions == [0]
        rollout.update_weights({"weight": []}, 1)
        assert rollout.stats().instances["rollout/0"].state is Health.HEALTHY


def test_update_weights_with_a_dead_worker(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, CountingRollout) as rollout:
        scheduler.kill("rollout/1")
        with pytest.raises(GroupCallError) as caught:
            rollout.update_weights({"weight": []}, 1)
        assert isinstance(caught.value.first, WorkerFailedError)
        assert rollout.generate([[1]])[0].versions == [1]
        assert rollout.update_weights({"weight": []}, 2) == 2


# --- close ----------------------------------------------------------------------------------------


def test_close_fails_waiting_requests(scheduler: FakeScheduler) -> None:
    rollout = started(scheduler, 1, max_in_flight_per_worker=1, max_queue=1)
    running, waiting = submit_all(rollout, [[1]] * 2)
    blocked = asyncio.run_coroutine_threadsafe(rollout.async_submit([1]), background_loop())
    settle()
    rollout.close()
    rollout.close()
    with pytest.raises(WorkerFailedError):
        running.result(LIMIT_S)
    with pytest.raises(
        HelmsmanError, match="'rollout-1' was not sent: the controller of role 'rollout' was closed"
    ):
        waiting.result(LIMIT_S)
    with pytest.raises(
        HelmsmanError, match="request rejected: the controller of role 'rollout' was closed"
    ):
        blocked.result(LIMIT_S)
    with pytest.raises(HelmsmanError, match="is closed; make a new one"):
        rollout.generate([[1]])
    with started(scheduler, 1, CountingRollout) as again:
        assert again.generate([[1]])[0].token_ids == [2]
