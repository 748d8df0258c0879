"""A healthy run of a kind, which continues until it is killed: ``python healthy.py KIND SEED``."""

from __future__ import annotations

import asyncio
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from helmsman import (
    Job,
    LocalScheduler,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    TrainController,
    WeightSync,
)
from helmsman.api.generation import GenerationResult
from helmsman.policies import SupervisionPolicy
from tests.desk.staged import Answers, Weights, call_all, join, ranks, ready

random_numbers = random.Random()
uniform = random_numbers.uniform


class Slow(Answers):
    """Replies after as many tenths of a second as the prompt states, and loads weights slowly."""

    async def agenerate(self, request: Any) -> GenerationResult:
        await asyncio.sleep(request.prompt_ids[0] / 10)
        return await super().agenerate(request)

    def update_weights(self, weights: Any, version: int) -> int:
        time.sleep(2.0)
        self.version = version
        return version


class Trainer(Weights):
    def train_batch(self, seconds: float, computes: bool) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not computes:
                time.sleep(0.05)


def slow_steps() -> Iterator[None]:
    """Steps of a fifth of a second; one in six takes up to six seconds on one rank."""
    with ranks(2, preload=["torch"]) as (scheduler, ids):
        join(scheduler, ids)
        ready(scheduler)
        while True:
            for _ in range(5):
                call_all(scheduler, ids, "step", 0.2)
            call_all(scheduler, ids, "step", uniform(2, 6))
            yield


def skewed_ranks() -> Iterator[None]:
    """One rank is three seconds late in each step."""
    with ranks(2, preload=["torch"]) as (scheduler, ids):
        join(scheduler, ids)
        ready(scheduler)
        while True:
            call_all(scheduler, ids, "step", uniform(2, 4))
            yield


def long_first_call() -> Iterator[None]:
    """The first call computes for twenty to forty seconds, as a compilation does."""
    with ranks(2) as (scheduler, ids):
        ready(scheduler)
        call_all(scheduler, ids, "compute", uniform(20, 40))
        while True:
            call_all(scheduler, ids, "quick")
            yield


def idle_phases() -> Iterator[None]:
    """The script sleeps or computes between calls."""
    with ranks(1) as (scheduler, ids):
        ready(scheduler)
        while True:
            scheduler.call_engine(ids[0], "quick")
            with scheduler.reporter.phase("evaluation"):
                time.sleep(uniform(5, 25))
            yield


def quiet_script() -> Iterator[None]:
    """The script waits for a thread of its own."""
    with ranks(1) as (scheduler, ids):
        ready(scheduler)
        inbox: queue.Queue[int] = queue.Queue()
        while True:
            scheduler.call_engine(ids[0], "quick")
            threading.Timer(uniform(1, 6), inbox.put, (1,)).start()
            inbox.get()
            yield


def rollout(tenths: Callable[[], int], *, num_requests: int) -> Iterator[None]:
    with LocalScheduler(preload=()) as scheduler:
        job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
        with RolloutController(scheduler, Slow, job) as controller:
            ready(scheduler)
            while True:
                prompts = [[tenths()] for _ in range(num_requests)]
                controller.generate(prompts, SamplingParams(max_new_tokens=4))
                yield


def long_generations() -> Iterator[None]:
    """Every request takes eight to thirteen seconds."""
    return rollout(lambda: random_numbers.randint(80, 130), num_requests=8)


def mixed_generations() -> Iterator[None]:
    """Requests of a tenth of a second to six seconds."""
    return rollout(lambda: random_numbers.choice([1, 2, 5, 10, 60]), num_requests=16)


def trains_in_turns(computes: bool) -> Iterator[None]:
    """Generation, a long optimizer step, and a weight sync of two seconds, in turns."""
    with LocalScheduler(preload=()) as scheduler:
        trainer = TrainController(
            scheduler, Trainer, Job(role="actor", tasks=[SchedulingSpec(cpu=0.5)])
        )
        job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
        with trainer, RolloutController(scheduler, Slow, job) as controller:
            sync = WeightSync(trainer, controller)
            ready(scheduler)
            version = 0
            while True:
                controller.generate([[20]] * 4, SamplingParams(max_new_tokens=4))
                seconds = uniform(4, 12)
                scheduler.call_engine("actor/0", "train_batch", None, seconds, computes)
                version += 1
                trainer.set_version(version)
                sync.push()
                yield


def supervised() -> Iterator[None]:
    """Requests run under supervision."""
    with LocalScheduler(preload=()) as scheduler:
        job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
        policy = SupervisionPolicy(max_restarts=1000)
        with RolloutController(scheduler, Slow, job, supervision=policy) as controller:
            ready(scheduler)
            while True:
                controller.generate([[5]] * 4, SamplingParams(max_new_tokens=4))
                yield


KINDS: dict[str, Callable[[], Iterator[None]]] = {
    "slow_steps": slow_steps,
    "skewed_ranks": skewed_ranks,
    "long_first_call": long_first_call,
    "idle_phases": idle_phases,
    "quiet_script": quiet_script,
    "long_generations": long_generations,
    "mixed_generations": mixed_generations,
    "computes_in_turns": lambda: trains_in_turns(computes=True),
    "waits_in_turns": lambda: trains_in_turns(computes=False),
    "supervised": supervised,
}

if __name__ == "__main__":
    random_numbers.seed(int(sys.argv[2]))
    for _ in KINDS[sys.argv[1]]():
        pass
