"""A RolloutController on a fake scheduler, whose requests the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from helmsman._base.event_loop import run_sync
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.controller.engines import CountingRollout
from tests.controller.fakes import FakeScheduler

LIMIT_S = 30.0


class Gated(CountingRollout):
    """Keeps requests in flight until the test ends them."""

    def __init__(self) -> None:
        super().__init__(gated=True)


def started(
    scheduler: FakeScheduler, replicas: int, engine: str | type[Any] = Gated, **options: Any
) -> RolloutController:
    controller = RolloutController(
        scheduler, engine, Job(role="rollout", replicas=replicas), **options
    )
    controller.initialize()
    return controller


def engine(scheduler: FakeScheduler, index: int) -> CountingRollout:
    found: CountingRollout = scheduler.engines[f"rollout/{index}"]
    return found


def settle() -> None:
    """Run the callbacks that are ready on the background loop."""

    async def idle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    run_sync(idle())


def finish(scheduler: FakeScheduler, index: int, num: int | None = None) -> list[str]:
    ended = run_sync(engine(scheduler, index).finish(num))
    settle()
    return ended


def submit_all(
    controller: RolloutController, prompts: Sequence[Sequence[int]], max_new_tokens: int = 1
) -> list[Any]:
    futures = [
        controller.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        for prompt in prompts
    ]
    settle()
    return futures
