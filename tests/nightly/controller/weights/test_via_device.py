"""Tests of ViaDevice for faults that the day tests leave out."""

from __future__ import annotations

import functools
import os
import re

import pytest

from helmsman import HelmsmanError, Scheduler, SupervisionPolicy
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.via_device import ViaDevice
from tests.contract.helpers import wait_until
from tests.controller.device_world import (
    NO_LIMIT,
    ON_DEVICE,
    buffers,
    require_current,
    resume,
    stopped_in_a_sync,
)
from tests.controller.sync_engines import KILL
from tests.controller.sync_world import World

WORLD = ON_DEVICE


def test_push_with_a_damaged_buffer_fails_its_instance(world: World) -> None:
    with stopped_in_a_sync(world) as pushing:
        buffers(world.pid(world.trainer.workers[-1].id), lambda byte: byte ^ 1)
        resume(world.pid(world.ids[-1]))
        report = pushing.result(120)
    assert report.updated == world.ids[:-1]
    assert re.search(
        "updated only in part: ValueError: .* wrong checks", report.failed[world.ids[-1]]
    )
    assert world.health()[-1] is Health.STALE
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


def test_push_from_a_trainer_rank_that_dies(world: World) -> None:
    with stopped_in_a_sync(world) as pushing:
        os.kill(world.pid(world.trainer.workers[-1].id), KILL)
        resume(world.pid(world.ids[-1]))
        with pytest.raises(HelmsmanError, match="SIGKILL"):
            pushing.result(120)
    world.trainer.recover()
    world.trainer.set_version(1 + max(filter(None, world.rollout.versions().values())))
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


def is_in(world: World, health: Health) -> bool:
    return world.health() == [health]


def test_rebuilt_instance_receives_the_weights(engines_scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(
        probe_every_s=0.2, suspect_s=10.0, dead_s=60.0, max_restarts=9, restart_pause_s=0.1
    )
    with World(engines_scheduler, 1, 1, "-rebuilt", supervision=policy, **ON_DEVICE) as world:
        for has_changed in (False, True):
            version = world.step()
            world.sync(ViaDevice(NO_LIMIT)).push()
            if has_changed:
                world.step()
            pid = world.pid(world.ids[0])
            os.kill(pid, KILL)
            expected = Health.STALE if has_changed else Health.HEALTHY
            wait_until(lambda: world.health() != [Health.HEALTHY], "the death is detected")
            wait_until(functools.partial(is_in, world, expected), "the instance is rebuilt")
            assert world.pid(world.ids[0]) != pid
            if not has_changed:
                assert world.rollout.versions() == {world.ids[0]: version}
                assert not any(world.differing().values())
