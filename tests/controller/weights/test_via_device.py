"""Tests of weight syncs through buffers that ranks and instances on a device share."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helmsman import HelmsmanError, SamplingParams, Scheduler
from helmsman.api.weights import WeightFormat
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.via_device import ViaDevice
from tests.controller.device_world import (
    FORM,
    NO_LIMIT,
    ON_DEVICE,
    memories,
    require_current,
    require_released,
    stopped_in_a_sync,
)
from tests.controller.sync_engines import KILL
from tests.controller.sync_world import PROMPT, World
from tests.engines.small_models import random_tokens

WORLD = ON_DEVICE


def test_push_is_the_default_on_shared_devices(world: World, tmp_path: Path) -> None:
    """The instances generate as the exported model does."""
    for _ in range(2):
        version = world.step()
        assert all(world.differing().values())
        report = world.sync(form=FORM).push()
        assert (report.version, report.updated, report.failed) == (version, world.ids, {})
        assert report.num_bytes == sum(each.nbytes for each in world.expected().values())
        require_current(world)
    world.trainer.export_hf(str(tmp_path / "exported"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    prompts = [PROMPT, random_tokens(9, seed=2), random_tokens(3, seed=3), PROMPT[:2]]
    results = world.rollout.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=8))
    for prompt, result in zip(prompts, results, strict=True):
        row = torch.tensor([prompt + result.token_ids])
        with torch.no_grad():
            logprobs = model(row).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == result.token_ids
        chosen = logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(result.logprobs), atol=1e-4)


def test_push_with_cast_and_larger_tensors_than_a_bucket(world: World) -> None:
    world.step()
    world.sync(form=WeightFormat(dtype="bfloat16", bucket_bytes=100)).push()
    expected = world.expected()
    for id_ in world.ids:
        served = world.scheduler.call_engine(id_, "parameters")
        assert all(
            torch.equal(served[name], tensor.bfloat16().float())
            for name, tensor in expected.items()
        )
    require_released(world)


def test_push_refuses_weights_that_do_not_fit(world: World) -> None:
    wrong = WeightFormat(names=(("embed_tokens", "embedding"),))
    world.step()
    with pytest.raises(HelmsmanError, match="which is unchanged. 1 missing"):
        world.sync(ViaDevice(NO_LIMIT), form=wrong).push()
    assert world.health() == [Health.STALE, Health.STALE]
    assert world.sync(form=FORM).push().updated == world.ids
    require_current(world)


def test_push_refuses_a_lower_version(world: World) -> None:
    """The trainer ranks do not wait for the instances that the refusal leaves out."""
    sync = world.sync(ViaDevice(NO_LIMIT))
    world.step()
    last = sync.push().version
    world.trainer.set_version(last - 1)
    with pytest.raises(ValueError, match="weight version is"):
        sync.push()
    world.trainer.set_version(last + 1)
    assert sync.push().updated == world.ids
    require_current(world)


def test_push_without_an_instance_that_refuses(world: World) -> None:
    """A trainer rank does not wait for an instance that never connects."""
    able, unable = world.ids
    world.step()
    world.scheduler.call_engine(unable, "refuse_updates", None, True)
    try:
        report = world.sync(ViaDevice(NO_LIMIT)).push()
        assert report.updated == (able,)
        assert "this engine cannot read them" in report.failed[unable]
    finally:
        world.scheduler.call_engine(unable, "refuse_updates", None, False)
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


def test_push_to_an_instance_that_dies(world: World) -> None:
    with stopped_in_a_sync(world) as pushing:
        os.kill(world.pid(world.ids[-1]), KILL)
        report = pushing.result(120)
    assert report.updated == world.ids[:-1]
    assert "SIGKILL" in report.failed[world.ids[-1]]
    trainers = [world.pid(each.id) for each in world.trainer.workers]
    assert [memories(pid) for pid in trainers] == [{}, {}]
    world.step()
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids[:-1]
    assert not any(world.differing(world.ids[:-1]).values())


def test_via_device_refuses_roles_on_other_devices(engines_scheduler: Scheduler) -> None:
    with World(engines_scheduler, 1, 1, "-apart", **{**ON_DEVICE, "beside": False}) as world:
        message = r"rollout-apart/0 is on device \d of node .*; expected a trainer rank there"
        with pytest.raises(ValueError, match=message):
            world.sync(ViaDevice())
        world.step()
        assert world.sync().push().updated == world.ids
        assert not any(world.differing().values())


def test_push_without_shared_memory_uses_via_memory(
    engines_scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    with World(engines_scheduler, 1, 1, "-unable", trainer="Socketless", **ON_DEVICE) as world:
        for _ in range(2):
            version = world.step()
            assert world.trainer.update_rollout(world.rollout) == version
            assert not any(world.differing().values())
        message = "to role rollout-unable by ViaMemory: .*Socketless has no open_weight_socket"
        assert len(re.findall(message, caplog.text)) == 1
