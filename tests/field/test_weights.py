"""Reports about weight syncs, pauses and devices that are used in turns."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman import (
    DeviceHandoff,
    HelmsmanError,
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    TrainController,
    WeightSync,
    make_scheduler,
)
from helmsman.api.errors import CallTimeoutError, EngineCallError
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.via_collective import ViaCollective
from tests.contract.helpers import LIMIT_S, wait_until
from tests.controller.engines import CountingRollout
from tests.controller.fakes import FakeScheduler
from tests.controller.sync_cases import BUCKETS
from tests.controller.sync_engines import STOP
from tests.controller.sync_world import World, resumed, way_of
from tests.engines.small_models import random_tokens
from tests.field.engines import Published, Steady

LIGHT = SchedulingSpec(cpu=0.1)


# --- miles #1967 ----------------------------------------------------------------------------------


class FaultyScheduler(FakeScheduler):
    """Raises in one call, before or after the engine has executed it."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: tuple[int, str] | None = None
        self.num_calls = 0

    async def async_call_engine(
        self, worker_id: str, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        self.num_calls += 1
        fault = self.fault[1] if self.fault and self.num_calls == self.fault[0] else ""
        if fault == "before":
            raise make_error(worker_id, method)
        result = await super().async_call_engine(worker_id, method, *args, **kwargs)
        if fault == "after":
            raise make_error(worker_id, method)
        if fault == "late":
            raise CallTimeoutError(
                worker_id=worker_id,
                engine_name=None,
                method=method,
                elapsed_s=1.0,
                limit_s=1.0,
                limit_source="the test",
                worker_alive=True,
                state="the call still runs",
                stack="",
            )
        return result


def make_error(worker_id: str, method: str) -> EngineCallError:
    return EngineCallError(
        worker_id=worker_id,
        engine_name=worker_id,
        method=method,
        remote_type="RuntimeError",
        remote_message="a fault of the test",
        remote_traceback="",
    )


@pytest.mark.parametrize("fault", ["before", "after", "late"])
@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_push_after_a_failed_push(fault: str, in_flight: Any) -> None:
    """Miles #1967: all later syncs wait, since a failed one has kept its lock.

    Each call of a push fails in turn; the next push succeeds, and requests are answered.
    """
    num_calls = push_with_fault(fault, in_flight, 0)
    assert num_calls >= 4
    for place in range(1, num_calls + 1):
        push_with_fault(fault, in_flight, place)


def push_with_fault(fault: str, in_flight: Any, place: int) -> int:
    """Push twice; one call of the first push fails, none if 0. Returns its number of calls."""
    scheduler: Any = FaultyScheduler()
    with (
        TrainController(scheduler, Published, Job(role="train", replicas=2)) as trainer,
        RolloutController(scheduler, CountingRollout, Job(role="rollout", replicas=2)) as rollout,
    ):
        sync = WeightSync(trainer, rollout, in_flight=in_flight)
        trainer.set_version(1)
        scheduler.num_calls, scheduler.fault = 0, (place, fault)
        if place:
            with pytest.raises(HelmsmanError, match="fault of the test|set by the test"):
                sync.push(timeout=10.0)
        else:
            sync.push(timeout=10.0)
        num_calls = int(scheduler.num_calls)
        scheduler.fault = None
        trainer.set_version(2)
        report = sync.push(timeout=10.0)
        assert (report.version, report.updated) == (2, ("rollout/0", "rollout/1"))
        assert set(rollout.versions().values()) == {2}
        assert [each.versions for each in rollout.generate([[1, 2]] * 4)] == [[2, 2]] * 4
    return num_calls


# --- verl #7846, prime-rl #2325 -------------------------------------------------------------------


def take_turns(scheduler: Scheduler, role: str, num_rounds: int) -> None:
    """Pause, resume, push and submit from several threads, in random orders."""
    trainer = TrainController(scheduler, Published, Job(role=f"{role}-train", tasks=[LIGHT]))
    rollout = RolloutController(scheduler, Steady, Job(role=role, replicas=2, tasks=[LIGHT]))
    versions = itertools.count(1)
    lock = threading.Lock()

    def push(draw: random.Random) -> None:
        with lock:
            version = next(versions)
            trainer.set_version(version)
            in_flight: Any = draw.choice(("keep", "wait", "abort"))
            report = WeightSync(trainer, rollout, in_flight=in_flight).push()
        assert (report.version, len(report.updated)) == (version, 2)

    def work(seed: int) -> list[Any]:
        draw, futures = random.Random(seed), []
        for _ in range(num_rounds // 4):
            match draw.choices(("submit", "pause", "resume", "push"), (6, 1, 1, 1))[0]:
                case "submit":
                    futures.append(rollout.submit([1, 2, 3]))
                case "pause":
                    rollout.pause(draw.choice(("keep", "wait", "abort")))
                    rollout.resume()
                case "resume":
                    rollout.resume()
                case _:
                    push(draw)
        return futures

    with trainer, rollout, ThreadPoolExecutor(4) as threads:
        futures = [each for futures in threads.map(work, range(4)) for each in futures]
        rollout.resume()
        for each in futures:
            assert each.result(LIMIT_S).token_ids == [1, 2, 3]
        stats = rollout.stats()
        assert (stats.num_queued, stats.paused) == (0, False)


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_pauses_and_pushes_of_several_threads(
    backend: str, role: str, request: pytest.FixtureRequest
) -> None:
    """Verl #7846, prime-rl #2325: a second resume overlaps new requests, and ranks diverge."""
    if backend == "local":
        take_turns(request.getfixturevalue("local"), role, 400)
    else:
        with make_scheduler("inline") as scheduler:
            take_turns(scheduler, role, 1200)


# --- verl #7990 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_devices_change_hands_under_load(in_flight: Any) -> None:
    """Verl #7990: a colocated run deadlocks in a sync, under many outstanding requests.

    4,096 requests wait while the devices change hands in both directions.
    """
    with (
        make_scheduler("inline") as scheduler,
        TrainController(scheduler, Published, Job(role="train")) as trainer,
        RolloutController(
            scheduler, Steady, Job(role="rollout", replicas=2), max_queue=8192
        ) as rollout,
    ):
        handoff = DeviceHandoff(trainer, rollout, in_flight=in_flight, hold_requests=True)
        handoff.to_training()
        futures = [rollout.submit([1, 2, 3]) for _ in range(4096)]
        for version in range(1, 4):
            trainer.set_version(version)
            report = handoff.to_rollout()
            assert report is not None
            assert report.version == version
            if version == 1:
                futures[0].result(LIMIT_S)
            handoff.to_training()
            futures += [rollout.submit([1, 2, 3]) for _ in range(64)]
        handoff.to_rollout()
        results = [each.result(LIMIT_S) for each in futures]
        assert {tuple(each.token_ids) for each in results} == {(1, 2, 3)}
        assert results[-1].versions == [3, 3, 3]
        assert len({each.request_id for each in results}) == 4096 + 3 * 64


# --- with a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["memory", "collective"])
def test_push_beside_a_step(way: str, world: World, tmp_path: Path) -> None:
    """Verl #7423: a push and a step use the ranks' process groups at once.

    A push from another thread is ordered before or after the step, or refused.
    """
    sync = world.sync(way_of(way, tmp_path))
    sync.push()
    with ThreadPoolExecutor(1) as threads:
        for _ in range(6):
            before = world.trainer.get_version()
            pushing = threads.submit(sync.push, timeout=60.0)
            world.step()
            error = pushing.exception(LIMIT_S)
            if error is None:
                assert pushing.result().version in (before, before + 1)
            else:
                assert f"weight version {before + 1}" in str(error)
    assert sync.push().updated == world.ids
    assert not any(world.differing().values())


def check_receiver_stops(world: World, place: int) -> None:
    """A receiver is stopped before one of the broadcasts; the other one gets the weights."""
    able, stopped = world.ids
    sync = world.sync(ViaCollective(timeout=2.0), form=BUCKETS)
    world.step()
    world.scheduler.call_engine(stopped, "fail_in_next_update", None, STOP, place)
    with resumed(world.pid(stopped)):
        report = sync.push(timeout=60.0)
        assert (report.updated, set(report.failed)) == ((able,), {stopped})
        assert report.failed[stopped]
        assert not any(world.differing([able]).values())
    wait_until(lambda: world.health()[1] is Health.STALE, "the other answers again")
    assert sync.push(timeout=60.0).updated == world.ids
    assert not any(world.differing().values())


def test_receiver_stops_in_a_broadcast(world: World) -> None:
    """TRL #6797 and #7103: a sync hangs without a message, as one receiver does not answer."""
    check_receiver_stops(world, 3)


def test_logprobs_after_many_updates(world: World) -> None:
    """NeMo-RL #4018 and #3152: the policy drifts from the trainer, as caches outlive updates.

    The same prompt is continued after each of 20 updates, some beside a running request.
    """
    prompt, sampling = random_tokens(24, seed=2), SamplingParams(max_new_tokens=6, seed=7)
    sync = world.sync(in_flight="abort")
    for number in range(20):
        version = world.step()
        running = world.rollout.submit(prompt, SamplingParams(max_new_tokens=24, seed=number))
        sync.push()
        for result in world.rollout.generate([prompt], sampling):
            assert set(result.versions) == {version}
            (row,) = world.trainer.forward([{"input_ids": [*prompt, *result.token_ids]}])
            torch.testing.assert_close(
                torch.as_tensor(row[len(prompt) :]),
                torch.tensor(result.logprobs),
                atol=1e-4,
                rtol=0.0,
                check_dtype=False,
            )
        assert len(running.result(LIMIT_S).token_ids) == 24
