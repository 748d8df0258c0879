"""Tests of DeviceHandoff: turns, refused calls, missing memory and deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from helmsman import SamplingParams, Scheduler, SupervisionPolicy
from helmsman.api.errors import (
    DeviceMemoryError,
    DevicesNotOwnedError,
    EngineCallError,
    HelmsmanError,
    RequestsInFlightError,
)
from helmsman.api.platforms import MemoryStats
from helmsman.controller._rollout.health import Health
from helmsman.controller._training.handoff import DeviceHandoff, Owner
from tests.contract.helpers import wait_until
from tests.controller.handoff_world import (
    GREEDY,
    PROMPTS,
    SAMPLES,
    Pair,
    check_learning,
    check_recovery,
)

SUPERVISED = SupervisionPolicy(probe_every_s=0.2, suspect_s=5.0, dead_s=30.0, restart_pause_s=0.1)

# --- turns ----------------------------------------------------------------------------------------


def test_handoff_of_reinforcement_learning(engines_scheduler: Scheduler) -> None:
    with Pair(engines_scheduler, "-learning", num_ranks=2) as pair:
        check_learning(pair)


def test_handoff_refuses_calls_out_of_turn(pair: Pair, tmp_path: Path) -> None:
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
    """With hold_requests, requests keep their tokens and continue after the trainer's turn."""
    turns = DeviceHandoff(pair.trainer, pair.rollout, in_flight="abort", hold_requests=True)
    turns.to_rollout()
    impatient = DeviceHandoff(pair.trainer, pair.rollout, timeout=0.1)
    impatient.owner = Owner.ROLLOUT
    before = pair.num_generated()
    future = pair.rollout.submit(PROMPTS[0], SamplingParams(max_new_tokens=4000, temperature=0))
    wait_until(lambda: pair.num_generated() > before, "the request has tokens")
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
    wait_until(lambda: pair.num_generated() > before, "the request continues")
    pair.rollout.abort()
    result = future.result(60)
    assert 1 < len(result.token_ids) < 4000
    assert result.versions[0] < version
    assert result.versions[-1] == version


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_device_memory_error_reports_both_sides(pair: Pair, kind: str) -> None:
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


def test_device_memory_error_when_the_rollout_is_closed(engines_scheduler: Scheduler) -> None:
    with Pair(engines_scheduler, "-closed") as pair:
        pair.turns.to_training()
        pair.rollout.close()
        pair.call(pair.train_id, "plan", "train_batch", "cuda")
        with pytest.raises(DeviceMemoryError, match=r"train_batch ran out of memory") as caught:
            pair.trainer.train_batch(SAMPLES, "sft")
        assert [line.split(":")[0] for line in caught.value.figures] == [pair.train_id]


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
def test_handoff_after_a_failed_hand_over(
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


def test_handoff_waits_for_an_instance_that_dies(engines_scheduler: Scheduler) -> None:
    """An instance that dies in a hand-over is rebuilt in its next turn."""
    with Pair(engines_scheduler, "-supervised", supervision=SUPERVISED) as pair:
        for method in ("sleep", "wake", "update_weights"):
            pair.generate()
            if method != "sleep":
                pair.turns.to_training()
            pair.call(pair.rollout_id, "plan", method, "kill")
            pair.step()
            assert pair.turns.owner is Owner.TRAINER
            results = pair.generate()  # waits for the instance
            assert [result.versions for result in results] == [[pair.trainer.get_version()] * 6] * 3
            assert pair.rollout.stats().instances[pair.rollout_id].state is Health.HEALTHY


def test_recover_of_a_trainer_that_dies_in_a_hand_over(pair: Pair, tmp_path: Path) -> None:
    check_recovery(pair, tmp_path, "sleep")


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
    assert rollout.stats().num_queued == 1, "the instance has no weights"
    version = pair.trainer.update_rollout(rollout)
    assert waiting.result(60).versions == [version] * 6
    with pytest.raises(ValueError, match="level is 3"):
        rollout.sleep(3)


def test_handoff_refuses_invalid_arguments(pair: Pair) -> None:
    with pytest.raises(ValueError, match="level is 0"):
        DeviceHandoff(pair.trainer, pair.rollout, level=0)
    with pytest.raises(ValueError, match="in_flight is 'keep'"):
        DeviceHandoff(pair.trainer, pair.rollout, in_flight="keep")  # type: ignore[arg-type]
