"""A trainer and a rollout on the same devices: whose turn it is, what the other may not, and what a
failure leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman import (
    GenerationResult,
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    SupervisionPolicy,
    TrainController,
    make_scheduler,
)
from helmsman.api.advantages import group_advantages
from helmsman.api.errors import (
    DeviceMemoryError,
    DevicesNotOwnedError,
    EngineCallError,
    HelmsmanError,
    RequestsInFlightError,
    WorkerFailedError,
)
from helmsman.api.platforms import MemoryStats
from helmsman.controller._device_handoff.handoff import DeviceHandoff, Owner
from helmsman.controller._generation.health import Health
from tests.contract.helpers import wait_until
from tests.engines.small_models import QWEN2, random_tokens

ENGINES = "tests.controller.turn_engines"
SAMPLES = [{"input_ids": random_tokens(12, seed=5)} for _ in range(4)]
PROMPTS = [random_tokens(6, seed=seed) for seed in range(3)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
SUPERVISED = SupervisionPolicy(probe_every_s=0.2, suspect_s=5.0, dead_s=30.0, restart_pause_s=0.1)

pytestmark = pytest.mark.slow


class Pair:
    """A trainer, and a rollout in siblings of its workers."""

    def __init__(self, scheduler: Scheduler, name: str, num_ranks: int = 1, **options: Any) -> None:
        self.scheduler = scheduler
        fields = {"model": QWEN2, "seed": 3}
        self.trainer = TrainController(
            scheduler,
            f"{ENGINES}.Trainer",
            Job(role=f"train{name}", replicas=num_ranks, tasks=[SchedulingSpec(cpu=0.1)]),
            engine_kwargs={**fields, "lr": 1e-2},
        )
        strategy = SchedulingStrategy(type="colocation", target=f"train{name}", fork=True)
        self.rollout = RolloutController(
            scheduler,
            f"{ENGINES}.Rollout",
            Job(
                role=f"rollout{name}",
                replicas=num_ranks,
                tasks=[SchedulingSpec(cpu=0.1)],
                scheduling_strategy=strategy,
            ),
            engine_kwargs={**fields, "max_concurrency": 8, "max_model_len": 4096},
            **options,
        )
        self.trainer.initialize()
        self.trainer.sleep()
        self.rollout.initialize()
        self.turns = DeviceHandoff(self.trainer, self.rollout)

    def call(self, worker: str, method: str, *args: Any) -> Any:
        return self.scheduler.call_engine(worker, method, None, *args)

    def num_generated(self) -> int:
        return self.call(self.rollout_id, "stats")["num_generated_tokens"]

    @property
    def train_id(self) -> str:
        return self.trainer.workers[0].id

    @property
    def rollout_id(self) -> str:
        return self.rollout.workers[0].id

    def asleep(self) -> tuple[bool, bool]:
        """Trainer and rollout."""
        return self.call(self.train_id, "is_asleep"), self.call(self.rollout_id, "is_asleep")

    def step(self) -> float:
        with self.turns.training():
            return self.trainer.train_batch(SAMPLES, "sft")["loss"]

    def generate(self) -> list[GenerationResult]:
        with self.turns.rollout():
            return self.rollout.generate(PROMPTS, GREEDY)

    def close(self) -> None:
        self.rollout.close()
        self.trainer.close()


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: Scheduler) -> Scheduler:
    return engines_scheduler


@pytest.fixture(scope="module")
def shared(scheduler: Scheduler) -> Iterator[Pair]:
    """For tests that leave both sides able to take a turn."""
    pair = Pair(scheduler, "-shared")
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield shared
    shared.trainer.device_owner = shared.rollout.device_owner = shared.turns
    shared.turns.owner = Owner.NONE
    shared.generate()
    shared.step()


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_handoff_of_reinforcement_learning(scheduler: Scheduler, num_ranks: int) -> None:
    """Each token was made by the weights of the step before, and the trainer computes the same
    log-probabilities.
    """
    with (
        make_scheduler("inline") if num_ranks == 1 else contextlib.nullcontext(scheduler) as chosen
    ):
        pair = Pair(chosen, "-learning", num_ranks)
        for step in range(3):
            with pair.turns.rollout() as report:
                assert report is not None
                assert report.version == step
                assert pair.asleep() == (True, False)
                results = pair.rollout.generate(
                    [[1, 2], [2, 2]], SamplingParams(max_new_tokens=6, seed=step), num_samples=4
                )
            assert {version for result in results for version in result.versions} == {step}
            rewards = [
                float(result.token_ids.count(7)) + 0.01 * sum(result.token_ids)
                for result in results
            ]
            samples = [
                {
                    "input_ids": [*prompt, *result.token_ids],
                    "loss_mask": [False] * 2 + [True] * 6,
                    "logprobs": [0.0] * 2 + result.logprobs,
                    "advantages": advantage,
                }
                for prompt, result, advantage in zip(
                    [[1, 2]] * 4 + [[2, 2]] * 4,
                    results,
                    group_advantages(rewards, group_size=4),
                    strict=True,
                )
            ]
            with pair.turns.training():
                assert pair.asleep() == (False, True)
                stats = pair.trainer.train_batch(samples, "grpo")
            assert stats["ratio"] == pytest.approx(1.0, abs=1e-3)
            assert pair.trainer.get_version() == step + 1
        pair.close()


def test_handoff_refuse_calls_out_of_turn(pair: Pair, tmp_path: Any) -> None:
    pair.turns.to_training()
    assert pair.turns.owner is Owner.TRAINER
    figures = pair.turns.memory()
    assert list(figures) == [pair.train_id, pair.rollout_id]
    assert all(
        isinstance(each, MemoryStats) and each.host_bytes > 1 << 20 for each in figures.values()
    )
    for call in (lambda: pair.rollout.generate(PROMPTS), lambda: pair.rollout.submit(PROMPTS[0])):
        with pytest.raises(
            DevicesNotOwnedError,
            match=rf"held by role '{pair.trainer.role}'. Call to_rollout\(\)",
        ):
            call()
    with pytest.raises(DevicesNotOwnedError, match="needs the devices, which are"):
        asyncio.run(pair.rollout.async_generate_one(PROMPTS[0]))
    pair.turns.to_rollout()
    assert pair.turns.to_rollout() is None
    assert pair.turns.owner is Owner.ROLLOUT
    refused = (
        lambda: pair.trainer.train_batch(SAMPLES, "sft"),
        lambda: pair.trainer.eval_batch(SAMPLES, "sft"),
        lambda: pair.trainer.forward(SAMPLES),
        lambda: pair.trainer.save(str(tmp_path / "checkpoint")),
    )
    for refused_call in refused:
        with pytest.raises(DevicesNotOwnedError, match=r"with handoff.training\(\)"):
            refused_call()
    pair.trainer.export_hf(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_handoff_with_requests_in_flight(pair: Pair) -> None:
    """And, taken back instead, they go on after the trainer's turn with the tokens that they
    have.
    """
    turns = DeviceHandoff(pair.trainer, pair.rollout, in_flight="abort", hold_requests=True)
    turns.to_rollout()
    impatient = DeviceHandoff(pair.trainer, pair.rollout, timeout=0.1)
    impatient.owner = Owner.ROLLOUT
    before = pair.num_generated()
    future = pair.rollout.submit(PROMPTS[0], SamplingParams(max_new_tokens=4000, temperature=0))
    wait_until(lambda: pair.num_generated() > before, "it has tokens")
    for hand_over in (impatient.to_training, impatient.make_room):
        with pytest.raises(RequestsInFlightError, match="sleep"):
            hand_over()
        assert impatient.owner is Owner.ROLLOUT
    assert pair.asleep() == (True, False)
    pair.trainer.device_owner = pair.rollout.device_owner = turns
    turns.to_training()
    assert not future.done()
    held = pair.rollout.submit(PROMPTS[1], GREEDY)
    pair.trainer.train_batch(SAMPLES, "sft")
    version = pair.trainer.get_version()
    assert pair.rollout.stats().num_queued == 2
    turns.to_rollout()
    assert held.result(60).versions == [version] * 6
    before = pair.num_generated()
    wait_until(lambda: pair.num_generated() > before, "it goes on")
    pair.rollout.abort()
    result = future.result(60)
    assert 1 < len(result.token_ids) < 4000
    assert result.versions[0] < version
    assert result.versions[-1] == version


# --- no room --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_device_memory_error_has_figures_of_both_sides(pair: Pair, kind: str) -> None:
    pair.step()
    pair.call(pair.train_id, "plan", "train_batch", kind)
    with pytest.raises(
        DeviceMemoryError, match=r"train_batch ran out of memory: .*out of memory. Tried"
    ) as caught:
        pair.trainer.train_batch(SAMPLES, "sft")
    error = caught.value
    assert isinstance(error.__cause__, EngineCallError)
    assert error.owner == f"held by role '{pair.trainer.role}'"
    assert [line.split(":")[0] for line in error.figures] == [pair.train_id, pair.rollout_id]
    assert all("no device" in line and "GiB on the host" in line for line in error.figures)
    assert pair.trainer.train_batch(SAMPLES, "sft")["loss"] > 0
    pair.turns.to_rollout()
    pair.call(pair.rollout_id, "plan", "agenerate", kind)
    with pytest.raises(DeviceMemoryError, match=rf"{pair.rollout_id}: agenerate ran out of memory"):
        pair.rollout.generate(PROMPTS[:1], GREEDY)
    pair.call(pair.rollout_id, "plan", "agenerate", "other")
    with pytest.raises(EngineCallError, match="the mesh is bent"):
        pair.rollout.generate(PROMPTS[:1], GREEDY)


def test_device_memory_error_when_the_rollout_is_closed() -> None:
    with make_scheduler("inline") as scheduler:
        pair = Pair(scheduler, "")
        pair.turns.to_training()
        pair.rollout.close()
        pair.call(pair.train_id, "plan", "train_batch", "cuda")
        with pytest.raises(DeviceMemoryError, match=r"train_batch ran out of memory") as caught:
            pair.trainer.train_batch(SAMPLES, "sft")
        assert [line.split(":")[0] for line in caught.value.figures] == [pair.train_id]
        pair.close()


@pytest.mark.parametrize(
    ("side", "method", "to", "then"),
    [
        ("train", "sleep", "rollout", "back"),
        ("rollout", "wake", "rollout", "again"),
        ("rollout", "wake", "rollout", "back"),
        ("rollout", "update_weights", "rollout", "back"),
        ("rollout", "sleep", "training", "again"),
        ("rollout", "sleep", "training", "back"),
        ("train", "wake", "training", "back"),
    ],
)
def test_handoff_after_a_hand_over_that_fails(
    pair: Pair, side: str, method: str, to: str, then: str
) -> None:
    steps = {"rollout": pair.turns.to_rollout, "training": pair.turns.to_training}
    other = "training" if to == "rollout" else "rollout"
    steps[other]()
    pair.call(pair.train_id if side == "train" else pair.rollout_id, "plan", method, "cuda")
    with pytest.raises(DeviceMemoryError, match=r"ran out of memory") as caught:
        steps[to]()
    assert caught.value.owner.startswith("unassigned")
    assert pair.turns.owner is Owner.NONE
    with pytest.raises(
        DevicesNotOwnedError,
        match=r"unassigned, since the hand-over to the .* failed \(DeviceMemoryError\)",
    ):
        pair.trainer.train_batch(SAMPLES, "sft")
    with pytest.raises(DevicesNotOwnedError, match="unassigned, since the hand-over"):
        pair.rollout.generate(PROMPTS)
    steps[to if then == "again" else other]()
    version = pair.trainer.get_version()
    assert [result.versions for result in pair.generate()] == [[version] * 6] * 3
    assert pair.step() > 0
    assert pair.trainer.get_version() == version + 1


# --- deaths ---------------------------------------------------------------------------------------


def test_handoff_wait_for_an_instance_that_dies(scheduler: Scheduler) -> None:
    """In a hand-over; it comes back in its turn."""
    pair = Pair(scheduler, "-supervised", supervision=SUPERVISED)
    for method in ("sleep", "wake", "update_weights"):
        pair.generate()
        if method != "sleep":
            pair.turns.to_training()
        pair.call(pair.rollout_id, "plan", method, "kill")
        pair.step()
        assert pair.turns.owner is Owner.TRAINER
        results = pair.generate()  # which wait for it
        assert [result.versions for result in results] == [[pair.trainer.get_version()] * 6] * 3
        assert pair.rollout.stats().instances[pair.rollout_id].state is Health.HEALTHY
    pair.close()


@pytest.mark.parametrize("method", ["sleep", "wake", "train_batch"])
def test_recover_of_a_trainer_that_dies_in_a_turn(pair: Pair, tmp_path: Any, method: str) -> None:
    """It is rebuilt on free devices."""
    pair.generate()
    pair.step()
    pair.trainer.save(str(tmp_path / "checkpoint"))
    if method == "wake":
        pair.turns.to_rollout()
    pair.call(pair.train_id, "plan", method, "kill")
    meet = {
        "train_batch": pair.step,
        "sleep": pair.turns.to_rollout,
        "wake": pair.turns.to_training,
    }[method]
    with pytest.raises(WorkerFailedError):
        meet()
    if method != "train_batch":
        assert pair.turns.owner is Owner.NONE
    version = pair.trainer.recover(str(tmp_path / "checkpoint"))
    assert pair.turns.owner is Owner.TRAINER
    assert pair.asleep() == (False, True)
    assert [result.versions for result in pair.generate()] == [[version] * 6] * 3
    assert pair.step() > 0
    assert isinstance(pair.turns.memory()[pair.train_id], MemoryStats)


# --- sleep of a rollout ---------------------------------------------------------------------------


def test_rollout_asleep_holds_its_requests(pair: Pair) -> None:
    pair.turns.to_rollout()
    pair.turns.close()
    rollout = pair.rollout
    expected = rollout.generate(PROMPTS[:1], GREEDY)[0]
    rollout.sleep()
    rollout.sleep(1)
    future = rollout.submit(PROMPTS[0], GREEDY)
    assert rollout.stats().paused
    with pytest.raises(HelmsmanError, match=r"is asleep.*wake\(weights_only=True\)"):
        pair.trainer.update_rollout(rollout)
    rollout.wake(weights_only=True)
    assert not future.done()
    rollout.wake()
    rollout.wake()
    assert future.result(60).token_ids == expected.token_ids

    rollout.sleep(2, "abort")
    waiting = rollout.submit(PROMPTS[0], GREEDY)
    rollout.wake()
    assert [each.state for each in rollout.stats().instances.values()] == [Health.STALE]
    assert rollout.stats().num_queued == 1, "there are no weights to continue it by"
    version = pair.trainer.update_rollout(rollout)
    assert waiting.result(60).versions == [version] * 6
    with pytest.raises(ValueError, match="level is 3"):
        rollout.sleep(3)


def test_handoff_refuse_invalid_arguments(pair: Pair) -> None:
    with pytest.raises(ValueError, match="level is 0"):
        DeviceHandoff(pair.trainer, pair.rollout, level=0)
    with pytest.raises(ValueError, match="in_flight is 'keep'"):
        DeviceHandoff(pair.trainer, pair.rollout, in_flight="keep")  # type: ignore[arg-type]
