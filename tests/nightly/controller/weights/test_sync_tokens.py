"""Test that each token reports the version of the weights that made it, among faults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from helmsman import HelmsmanError, RetryGeneration, SamplingParams, Scheduler, SupervisionPolicy
from helmsman.api.generation import GenerationResult
from helmsman.api.weights import WeightFormat
from helmsman.controller._weights.sync import SyncReport, WeightSync
from helmsman.controller._weights.transport import ViaDisk, ViaMemory
from helmsman.controller._weights.via_collective import ViaCollective
from tests.controller.sync_engines import KILL
from tests.controller.sync_world import PROMPT, World
from tests.engines.small_models import LLAMA, VOCAB

SAMPLING = SamplingParams(max_new_tokens=110, temperature=0.0)
NUM_PUSHES = 12


@pytest.mark.timeout(300)
def test_push_versions_of_tokens_among_faults(engines_scheduler: Scheduler, tmp_path: Path) -> None:
    """Instances are killed, rebuilt, added and removed, and weights are pushed in all ways."""
    policy = SupervisionPolicy(
        probe_every_s=0.2, suspect_s=10.0, dead_s=60.0, max_restarts=99, restart_pause_s=0.1
    )
    draw = random.Random(8)
    options: dict[str, Any] = {
        "model": LLAMA,
        "trainer": "Marked",
        "retries": RetryGeneration(),
        "supervision": policy,
    }
    with (
        concurrent.futures.ThreadPoolExecutor(2) as threads,
        World(engines_scheduler, 2, 3, **options) as world,
    ):
        ways = [ViaMemory(), ViaDisk(str(tmp_path)), ViaCollective(timeout=20.0)]
        results: list[Future[GenerationResult]] = []
        faults: list[Future[None]] = []
        for version in range(1, NUM_PUSHES + 1):
            mark(threads, world, version)
            way, in_flight = draw.choice(ways), draw.choice(["keep", "wait", "abort"])
            form = WeightFormat(
                bucket_bytes=draw.choice([1000, 5000, 1 << 30]), checksum=draw.random() < 0.5
            )
            sync = world.sync(way, form=form, in_flight=in_flight)  # type: ignore[arg-type]
            if version > 1:
                results += [world.rollout.submit(PROMPT, SAMPLING) for _ in range(8)]
                fault = draw.choice(["none", "none", "kill", "scale", "interrupt"])
                if fault == "kill":
                    faults.append(
                        threads.submit(
                            kill, world, draw.choice([i.id for i in world.rollout.workers])
                        )
                    )
                elif fault == "scale":
                    faults.append(
                        threads.submit(
                            world.rollout.scale, draw.choice([2, 3, 4]), migrate=draw.random() < 0.5
                        )
                    )
                elif fault == "interrupt":
                    with contextlib.suppress(HelmsmanError):  # The push may complete in time.
                        sync.push(timeout=draw.choice([0.001, 0.01, 0.03]))
            assert until_pushed(sync).version == version
        for each in faults:
            each.result(120)
        world.sync().push()
        results += [world.rollout.submit(PROMPT, SAMPLING) for _ in range(8)]
        for result in [future.result(120) for future in results]:
            assert len(result.token_ids) == 110
            assert result.versions == sorted(result.versions)
            assert result.token_ids == [version % VOCAB for version in result.versions]
        assert set(result.versions) == {NUM_PUSHES}


def mark(threads: concurrent.futures.Executor, world: World, version: int) -> None:
    """Set the weights of a version; both ranks take part in a collective."""
    list(
        threads.map(
            lambda w: world.scheduler.call_engine(w.id, "mark", None, version),
            world.trainer.workers,
        )
    )


def kill(world: World, worker_id: str) -> None:
    with contextlib.suppress(StopIteration, ProcessLookupError):  # The process has exited already.
        os.kill(world.pid(worker_id), KILL)


def until_pushed(sync: WeightSync) -> SyncReport:
    """Push until an instance serves the weights; for a moment there may be none."""
    deadline = time.monotonic() + 120
    while True:
        try:
            report = sync.push(timeout=60)
        except HelmsmanError:
            assert time.monotonic() < deadline
            continue
        if report.updated:
            return report
        assert time.monotonic() < deadline
