"""Test two policies on the base model of one rollout role, each with a trainer of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helmsman import (
    GenerationResult,
    Job,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    SupervisionPolicy,
    TrainController,
    WeightSync,
)
from helmsman.api.errors import GroupCallError
from helmsman.weights import ViaCollective, ViaDisk, ViaMemory, WeightFormat
from tests.contract.helpers import wait_until
from tests.controller.rollout.helpers import all_serve, kill, pid_of
from tests.engines.small_models import LLAMA, random_tokens

pytestmark = pytest.mark.timeout(300)

SPEC = SchedulingSpec(cpu=0.1, port_count=1)
POLICY = SupervisionPolicy(probe_every_s=0.1, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
OPTIONS = {"supervision": POLICY, "retries": RetryGeneration()}
SHORT = SamplingParams(max_new_tokens=24)
LONG = SamplingParams(max_new_tokens=1500)
PROMPT = random_tokens(6, seed=1)


class Policy:
    """A trainer of adapters, and the instances that serve its policy."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: str,
        name: str,
        lora: Any,
        beside: str,
        options: dict[str, Any],
    ) -> None:
        self.train = TrainController(
            scheduler,
            "helmsman.engines.train.FSDPTrainEngine",
            Job(role=f"train-{name}", tasks=[SPEC]),
            engine_kwargs={"model": model, "lr": 1e-2, "lora": {"alpha": 8.0, **lora}},
        )
        engine = "helmsman.engines.rollout.HFRolloutEngine"
        fields = {"model": model, "max_concurrency": 8, "max_model_len": 2048}
        strategy = SchedulingStrategy()
        if beside:
            engine, fields = "helmsman.engines.shared_base.another_policy", {}
            strategy = SchedulingStrategy(type="colocation", target=beside)
        self.rollout = RolloutController(
            scheduler,
            engine,
            Job(role=name, replicas=2, tasks=[SPEC], scheduling_strategy=strategy),
            engine_kwargs=fields,
            **options,
        )
        self.long: list[Future[GenerationResult]] = []

    def learn(self, seed: int, way: Any) -> None:
        """Take a step, and send its adapter while requests are in flight."""
        self.train.train_batch(
            [{"input_ids": random_tokens(20, seed=seed + i)} for i in (0, 1)], "sft"
        )
        self.long += [self.rollout.submit(PROMPT, LONG) for _ in range(2)]
        self.sync(way).push()

    def sync(self, way: Any, *, adapters: bool = True) -> WeightSync:
        form = WeightFormat(adapters=adapters)
        return WeightSync(self.train, self.rollout, way, form=form, in_flight="keep")

    def require_the_trainers(self) -> None:
        """Require the versions and log-probabilities of the trainer, of every instance."""
        results = self.rollout.generate([PROMPT] * 8, SHORT)
        rows = self.train.forward([{"input_ids": [*PROMPT, *each.token_ids]} for each in results])
        for result, row in zip(results, rows, strict=True):
            assert set(result.versions) == {self.train.get_version()}
            found = torch.tensor(result.logprobs)
            torch.testing.assert_close(found, row[len(PROMPT) :], atol=1e-4, rtol=1e-4)
        expected = dict.fromkeys(
            (each.id for each in self.rollout.workers), self.train.get_version()
        )
        assert self.rollout.versions() == expected

    def require_versions(self) -> None:
        """Require that requests in flight have ended, under versions that only grow."""
        for result in [future.result(120) for future in self.long]:
            assert len(result.token_ids) == 1500
            assert result.versions == sorted(result.versions)


@pytest.fixture(params=[OPTIONS])
def policies(
    engines_scheduler: Scheduler, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[Policy]]:
    model = str(tmp_path / "base")
    with TrainController(
        engines_scheduler,
        "helmsman.engines.train.FSDPTrainEngine",
        Job(role="base", tasks=[SPEC]),
        engine_kwargs={"model": LLAMA, "seed": 3},
    ) as base:
        base.export_hf(model)
    one = Policy(engines_scheduler, model, "first", {"rank": 2, "targets": ["q_proj"]}, "", OPTIONS)
    lora = {"rank": 5, "dropout": 0.1}
    other = Policy(engines_scheduler, model, "second", lora, "first", request.param)
    with contextlib.ExitStack() as stack:
        for each in (one, other):
            stack.enter_context(each.train)
            stack.enter_context(each.rollout)
        yield [one, other]


def test_policies_with_trainers_of_their_own(
    policies: list[Policy], engines_scheduler: Scheduler, tmp_path: Path
) -> None:
    one, other = policies
    ways = [ViaMemory(), ViaCollective(timeout=60.0), ViaDisk(str(tmp_path / "weights"))]
    for number, way in enumerate([*ways, ways[1], ways[0]]):
        one.learn(10 * number, way)
        one.require_the_trainers()
        other.learn(100 + 10 * number, way)
        other.learn(200 + 10 * number, way)
        for each in policies:
            each.require_the_trainers()
    for each in policies:
        with pytest.raises(
            GroupCallError, match="a whole model would change the base .*adapters=T"
        ):
            each.sync(ViaMemory(), adapters=False).push()
    for each in policies:
        each.sync(ViaMemory()).push()
        each.require_the_trainers()
        each.require_versions()


def test_killed_instance_brings_back_both(
    policies: list[Policy], engines_scheduler: Scheduler
) -> None:
    """The first role restarts the process once, and each policy its engine with its adapter."""
    one, other = policies
    one.learn(1, ViaMemory())
    for seed in (2, 3):
        other.learn(seed, ViaMemory())
    for each in policies:
        each.long += [each.rollout.submit(PROMPT, LONG) for _ in range(4)]
    for killed in (["first/0"], ["first/1"], ["first/0", "first/1"]):
        new = restarted(engines_scheduler, *killed)
        for each in policies:
            wait_until(functools.partial(all_serve, each.rollout), "all serve again", 60.0)
            each.require_the_trainers()
        assert {id_: pid_of(engines_scheduler, id_) for id_ in new} == new
    for each in policies:
        each.require_versions()


def restarted(scheduler: Scheduler, *worker_ids: str) -> dict[str, int]:
    """Kill workers, and wait for their new processes; return their pids."""
    old = {id_: kill(scheduler, id_) for id_ in worker_ids}

    def new() -> dict[str, int]:
        return {id_: pid_of(scheduler, id_) for id_ in worker_ids}

    wait_until(lambda: not old.items() & new().items() and all(new().values()), "they restart")
    return new()


SLOW = SupervisionPolicy(probe_every_s=100.0, suspect_s=200.0, dead_s=300.0, restart_pause_s=0.1)


@pytest.mark.parametrize("policies", [{**OPTIONS, "supervision": SLOW}], indirect=True)
def test_restart_that_a_policy_finds_by_a_request(
    policies: list[Policy], engines_scheduler: Scheduler
) -> None:
    """The second role has sent nothing while its worker was restarted, and has not probed it."""
    one, other = policies
    other.train.train_batch([{"input_ids": random_tokens(20, seed=1)}] * 2, "sft")
    other.sync(ViaMemory()).push()
    restarted(engines_scheduler, "first/0", "first/1")
    wait_until(lambda: all_serve(one.rollout), "the first role serves again", 60.0)
    assert len(other.rollout.generate([PROMPT] * 4, SHORT)) == 4
    wait_until(lambda: all_serve(other.rollout), "the second one, too", 60.0)
    other.require_the_trainers()


@pytest.mark.parametrize("policies", [{"supervision": POLICY}], indirect=True)
def test_restart_that_a_policy_finds_by_a_probe(
    policies: list[Policy], engines_scheduler: Scheduler
) -> None:
    """Without requests in flight, the default retries are enough."""
    other = policies[1]
    other.train.train_batch([{"input_ids": random_tokens(20, seed=1)}] * 2, "sft")
    other.sync(ViaMemory()).push()
    restarted(engines_scheduler, "first/0", "first/1")
    ids = [each.id for each in other.rollout.workers]
    wait_until(lambda: engines_of(engines_scheduler, ids) == ids, "the engines are back", 60.0)
    wait_until(lambda: all_serve(other.rollout), "the second role serves again", 60.0)
    other.require_the_trainers()


def engines_of(scheduler: Scheduler, ids: list[str]) -> list[str]:
    """Return those of these names that engines of the workers have."""
    engines = [name for each in scheduler.status() if each.health for name in each.health.engines]
    return [id_ for id_ in ids if id_ in engines]


IMPATIENT = SupervisionPolicy(probe_every_s=0.1, suspect_s=0.5, dead_s=1.0, restart_pause_s=0.1)


@pytest.mark.parametrize("policies", [{**OPTIONS, "supervision": IMPATIENT}], indirect=True)
def test_worker_that_only_the_second_role_gives_up(
    policies: list[Policy], engines_scheduler: Scheduler
) -> None:
    """Its owner does not restart it, so the engine that is still there serves again."""
    one, other = policies
    other.train.train_batch([{"input_ids": random_tokens(20, seed=1)}] * 2, "sft")
    other.sync(ViaMemory()).push()
    pid = pid_of(engines_scheduler, "first/0")
    process = psutil.Process(pid)
    process.suspend()
    try:
        wait_until(lambda: not is_alive(other.rollout, "second/0"), "it is given up", 60.0)
    finally:
        process.resume()
    wait_until(lambda: all_serve(other.rollout), "it serves again", 60.0)
    other.require_the_trainers()
    assert all_serve(one.rollout)
    assert pid_of(engines_scheduler, "first/0") == pid


def is_alive(rollout: RolloutController, worker_id: str) -> bool:
    return rollout.stats().instances[worker_id].state.is_alive
