"""Tests of BoundedStaleness on a virtual clock: over-sampling, bias and age of batches."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.controller._rollout.episode_runner import EpisodeRunner
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.staleness import BoundedStaleness, Episode
from helmsman.testing import (
    EngineModel,
    SimulatedBackend,
    SimulatedInstance,
    log_normal_lengths,
    run_virtually,
)
from tests.unit.controller.rollout.backends import make_request, settle, virtually


def numbers(batch: list[Episode]) -> list[int]:
    return [episode.number for episode in batch]


def now() -> float:
    return asyncio.get_running_loop().time()


def lasting(
    *seconds: float, rejected: tuple[int, ...] = (), failing: tuple[int, ...] = ()
) -> Callable[[int], Any]:
    """Return a workflow whose item n takes ``seconds[n]``, or 1 s beyond the list."""

    async def workflow(item: int) -> int | None:
        await asyncio.sleep(seconds[item] if item < len(seconds) else 1.0)
        if item in failing:
            raise ValueError(f"no answer in {item}")
        return None if item in rejected else item

    return workflow


# --- over-sampling --------------------------------------------------------------------------------


@virtually
async def test_oversample_takes_the_order_of_starts() -> None:
    runner = EpisodeRunner(lasting(5, 1, 9, 1, 1, 1), batch_policy=BoundedStaleness(oversample=1.5))
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 1, 2, 3]
    assert now() == pytest.approx(9.0, abs=1e-3)
    assert runner.figures().num_waiting == 2, "spare episodes are not preferred for an early end"


@virtually
async def test_oversample_replaces_rejected_and_failed_episodes() -> None:
    workflow = lasting(5, 1, 2, 1, 3, 1, 1, rejected=(1,), failing=(2,))
    runner = EpisodeRunner(workflow, batch_policy=BoundedStaleness(oversample=1.5))
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 3, 4, 5]
    assert now() == pytest.approx(5.0, abs=1e-3), "spare episodes replace them at once"
    figures = runner.figures()
    assert (figures.num_started, figures.num_rejected, figures.num_failed) == (8, 1, 1), (
        "two new spare episodes start at once"
    )


@virtually
async def test_no_oversample_replaces_by_fresh_starts() -> None:
    runner = EpisodeRunner(lasting(5, 1, 5, 5, 3, rejected=(1,)), batch_policy=BoundedStaleness())
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 2, 3, 4]
    assert now() == pytest.approx(5.0, abs=1e-3), "the replacement starts after 1 s"


@virtually
async def test_takes_first() -> None:
    runner = EpisodeRunner(
        lasting(5, 1, 9, 2, 3, 4), batch_policy=BoundedStaleness(oversample=1.5, takes_first=True)
    )
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [1, 3, 4, 5]
    assert now() == pytest.approx(4.0, abs=1e-3)
    assert runner.figures().num_running == 2, "the rest continues"
    runner.set_version(1)
    await runner.prepare_batch(itertools.count(10), 4)
    assert runner.figures().num_stopped == 2, "episodes that are too old are stopped"


@virtually
async def test_stops_rest_at_once() -> None:
    ended: list[int] = []

    async def workflow(item: int) -> int:
        try:
            await asyncio.sleep(item)
        except asyncio.CancelledError:
            ended.append(item)
            raise
        return item

    runner = EpisodeRunner(
        workflow, batch_policy=BoundedStaleness(oversample=1.5, takes_first=True, stops_rest=True)
    )
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 1, 2, 3]
    await settle()
    assert (ended, runner.figures().num_stopped, runner.figures().num_running) == ([4, 5], 2, 0)


@virtually
async def test_stops_rest_keeps_early_starts() -> None:
    runner = EpisodeRunner(
        lasting(*[1.0] * 4, *[50.0] * 6),
        batch_policy=BoundedStaleness(1, oversample=1.5, stops_rest=True),
    )
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 1, 2, 3]
    await settle()
    figures = runner.figures()
    assert (figures.num_started, figures.num_running, figures.num_stopped) == (10, 4, 2), (
        "the last starts are stopped"
    )
    runner.set_version(1)
    assert numbers(await runner.prepare_batch(itertools.count(20), 4)) == [4, 5, 6, 7]


@virtually
async def test_stops_rest_too_old_for_later_batches() -> None:
    runner = EpisodeRunner(
        lasting(100, 100), batch_policy=BoundedStaleness(1, takes_first=True, stops_rest=True)
    )
    source = itertools.count()
    assert numbers(await runner.prepare_batch(source, 2)) == [2, 3]
    assert runner.figures().num_stopped == 0, "0 and 1 may be in the next batch"
    runner.set_version(1)
    assert numbers(await runner.prepare_batch(source, 2)) == [4, 5]
    figures = runner.figures()
    assert (figures.num_stopped, figures.num_started, figures.num_running) == (2, 8, 2), (
        "but not in the batch after it"
    )


@virtually
async def test_oversample_spares_serve_later_batches() -> None:
    workflow = lasting(*[1.0] * 12, rejected=(4, 5, 6, 7))
    runner = EpisodeRunner(workflow, batch_policy=BoundedStaleness(1, oversample=2))
    source = itertools.count()
    assert numbers(await runner.prepare_batch(source, 4)) == [0, 1, 2, 3]
    runner.set_version(1)
    batch = await runner.prepare_batch(source, 4)
    assert numbers(batch) == [8, 9, 10, 11], "the spare episodes of the first batch"
    assert {episode.version for episode in batch} == {0}


def mean_lengths(
    batch_policy: BoundedStaleness, num_batches: int = 5, batch_size: int = 32
) -> tuple[float, float, float]:
    """Run simulated engines.

    Returns:
        Mean length of the episodes in batches, mean length of all started episodes, and seconds
        per batch.
    """
    lengths = log_normal_lengths(seed=5, mean=200.0, sigma=1.0)

    async def run() -> tuple[float, float, float]:
        instances = {
            id_: SimulatedInstance(id_, EngineModel(), lengths) for id_ in ("i0", "i1", "i2", "i3")
        }
        requests = GenerateScheduler(SimulatedBackend(instances))
        for id_ in instances:
            requests.add(id_, 64)

        async def workflow(item: int) -> int:
            (ticket,) = requests.put([make_request(f"r{item}", max_new_tokens=100_000)])
            try:
                return len((await asyncio.wrap_future(ticket.future)).token_ids)
            except asyncio.CancelledError:
                await requests.abort([ticket.request_id])
                raise

        runner = EpisodeRunner(workflow, batch_policy=batch_policy)
        source, used = itertools.count(), list[int]()
        for version in range(num_batches):
            used += [episode.value for episode in await runner.prepare_batch(source, batch_size)]
            runner.set_version(version + 1)
        started = [
            lengths(make_request(f"r{item}")) for item in range(runner.figures().num_started)
        ]
        await runner.close()
        return statistics.fmean(used), statistics.fmean(started), now() / num_batches

    return run_virtually(run())


@pytest.mark.parametrize(("staleness", "stops_rest"), [(0, False), (1, True)])
def test_takes_first_favours_short_episodes(staleness: int, stops_rest: bool) -> None:
    first, started_with_first, first_s = mean_lengths(
        BoundedStaleness(staleness, oversample=1.5, takes_first=True, stops_rest=stops_rest)
    )
    unbiased, started, unbiased_s = mean_lengths(
        BoundedStaleness(staleness, oversample=1.5, stops_rest=stops_rest)
    )
    assert first < 0.85 * started_with_first
    assert unbiased == pytest.approx(started, rel=0.1)
    assert first_s < unbiased_s


# --- age ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "version", "num_started"),
    [(0.0, 0, 4), (0.5, 0, 6), (1.0, 0, 8), (1.0, 100, 8), (2.25, 0, 13)],
)
@virtually
async def test_max_staleness_early_starts(staleness: float, version: int, num_started: int) -> None:
    runner = EpisodeRunner(
        lasting(*[1.0] * 4, *[100.0] * 20), batch_policy=BoundedStaleness(staleness)
    )
    runner.set_version(version)
    assert numbers(await runner.prepare_batch(itertools.count(), 4)) == [0, 1, 2, 3]
    assert runner.figures().num_started == num_started


@virtually
async def test_max_staleness_slow_episode() -> None:
    runner = EpisodeRunner(lasting(100.0), batch_policy=BoundedStaleness(1))
    source = itertools.count()
    assert numbers(await runner.prepare_batch(source, 2)) == [1, 2], (
        "item 0 may be in the next batch"
    )
    runner.set_version(1)
    assert numbers(await runner.prepare_batch(source, 2)) == [0, 3], "item 0 must be in this batch"
    assert now() == pytest.approx(100.0, abs=1e-3)


@virtually
async def test_max_staleness_batches_of_one_version() -> None:
    runner = EpisodeRunner(lasting(), batch_policy=BoundedStaleness(1))
    source = itertools.count()
    used = []
    for version in range(5):
        for _ in range(2):
            used += numbers(await runner.prepare_batch(source, 4))
        runner.set_version(version + 1)
    assert used == list(range(40))


@virtually
async def test_max_staleness_keeps_long_episodes() -> None:
    """Eight slow episodes may miss one batch of four, and no more."""
    runner = EpisodeRunner(lasting(*[100.0] * 8), batch_policy=BoundedStaleness(2))
    source, used = itertools.count(), []
    for version in range(4):
        batch = await runner.prepare_batch(source, 4)
        assert all(version - episode.version <= 2 for episode in batch)
        used += numbers(batch)
        runner.set_version(version + 1)
    figures = runner.figures()
    assert (figures.num_evicted, figures.num_stopped) == (0, 0)
    assert set(range(8)) <= set(used)


class RandomWorkflow:
    """A workflow whose durations, rejections and failures are random."""

    def __init__(self, seed: int, rejected: float, failing: float) -> None:
        self._seed, self._rejected, self._failing = seed, rejected, failing

    def is_kept(self, item: int) -> bool:
        return self._draw(item)[1] >= self._rejected + self._failing

    def _draw(self, item: int) -> tuple[float, float]:
        drawn = random.Random(f"{self._seed} {item}")
        return drawn.lognormvariate(0.0, 1.5), drawn.random()

    async def __call__(self, item: int) -> int | None:
        seconds, outcome = self._draw(item)
        await asyncio.sleep(seconds)
        if outcome < self._failing:
            raise ValueError("no answer")
        return item if self.is_kept(item) else None


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    oversample=st.sampled_from([1.0, 1.25, 1.5, 3.0]),
    takes_first=st.booleans(),
    stops_rest=st.booleans(),
    rejected=st.sampled_from([0.0, 0.3]),
    failing=st.sampled_from([0.0, 0.2]),
    size=st.integers(1, 9),
    step_s=st.sampled_from([0.0, 1.0, 10.0]),
)
def test_bounded_staleness_holds_its_bounds(
    seed: int,
    staleness: float,
    oversample: float,
    takes_first: bool,
    stops_rest: bool,
    rejected: float,
    failing: float,
    size: int,
    step_s: float,
) -> None:
    workflow = RandomWorkflow(seed, rejected, failing)
    taken: list[int] = []

    def source() -> Iterator[int]:
        for item in itertools.count():
            taken.append(item)
            yield item

    async def run() -> None:
        batch_policy = BoundedStaleness(
            staleness, oversample=oversample, takes_first=takes_first, stops_rest=stops_rest
        )
        runner = EpisodeRunner(workflow, batch_policy=batch_policy, max_failures=10**6)
        items, used = source(), list[int]()
        for version in range(8):
            batch = await runner.prepare_batch(items, size)
            assert len(batch) == size
            assert all(0 <= version - episode.version <= math.ceil(staleness) for episode in batch)
            used += numbers(batch)
            figures = runner.figures()
            left = figures.num_running + figures.num_waiting
            spare = 0.0 if stops_rest else oversample - 1.0
            assert left <= (staleness + spare) * size + 1e-6
            assert (
                figures.num_started
                == left
                + figures.num_used
                + figures.num_rejected
                + figures.num_failed
                + (figures.num_stopped + figures.num_evicted)
            )
            if not takes_first and staleness == 0.0:
                kept = [
                    item
                    for item in range(min(numbers(batch)), taken[-1] + 1)
                    if workflow.is_kept(item)
                ]
                assert numbers(batch) == kept[:size], "episodes are in the order of starts"
            if not takes_first and oversample == 1.0 and not stops_rest:
                assert figures.num_stopped == figures.num_evicted == 0, (
                    "no long episode is discarded"
                )
            await asyncio.sleep(step_s)
            runner.set_version(version + 1)
        assert len(set(used)) == len(used)
        await runner.close()

    run_virtually(run())


def test_bounded_staleness_refuses_invalid_values() -> None:
    for options in (
        {"max_staleness": -1.0},
        {"max_staleness": math.inf},
        {"oversample": 0.9},
        {"max_staleness": math.nan},
        {"oversample": math.nan},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            BoundedStaleness(**options)  # type: ignore[arg-type]
