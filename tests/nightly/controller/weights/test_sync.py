"""Tests of WeightSync for the faults and transports that the day tests leave out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from helmsman import Scheduler, SupervisionPolicy, make_scheduler
from helmsman.api.weights import WeightFormat
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.sync import WeightSync
from helmsman.controller._weights.transport import ViaDisk, ViaMemory
from helmsman.controller._weights.via_collective import ViaCollective
from tests.contract.helpers import stop, wait_until
from tests.controller.sync_cases import (
    InFlight,
    check_changed_weights,
    check_damaged_file,
    check_failing_cast,
    check_member_killed,
    check_mismatching_names,
    check_several_threads,
)
from tests.controller.sync_engines import KILL
from tests.controller.sync_world import SUPERVISED, World, resumed


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_push_of_mismatching_names(way: str, world: World, tmp_path: Path) -> None:
    check_mismatching_names(way, world, tmp_path)


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_push_with_a_failing_cast_releases_all_ranks(
    way: str, world: World, tmp_path: Path
) -> None:
    check_failing_cast(way, world, tmp_path)


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_push_refuses_weights_that_changed(way: str, world: World, tmp_path: Path) -> None:
    check_changed_weights(way, world, tmp_path)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_via_disk_damaged_file_makes_readers_stale(
    in_flight: InFlight, world: World, tmp_path: Path
) -> None:
    check_damaged_file(in_flight, world, tmp_path)


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_push_from_several_threads(way: str, world: World, tmp_path: Path) -> None:
    check_several_threads(way, world, tmp_path)


@pytest.mark.parametrize(
    "place", [None, 0, 2, -1], ids=["joining", "first header", "header of a bucket", "end"]
)
def test_via_collective_member_killed(place: int | None, world: World) -> None:
    check_member_killed(place, world)


def test_via_collective_of_several_groups_in_turn(world: World) -> None:
    """A trainer's rank 0 and an instance are members of one group at a time."""
    with World(world.scheduler, 1, 1, "-other", supervision=SUPERVISED) as other:
        syncs = [world.sync(ViaCollective(timeout=10.0)) for _ in range(2)]
        syncs.append(WeightSync(world.trainer, other.rollout, ViaCollective(timeout=10.0)))
        syncs.append(other.sync(ViaCollective(timeout=10.0)))
        for _ in range(3):
            for sync, (rollout, trainer) in zip(
                syncs, [(world, world)] * 2 + [(other, world), (other, other)], strict=True
            ):
                trainer.trainer.set_version(
                    1 + max(world.trainer.get_version(), other.trainer.get_version())
                )
                num_updates = rollout.updates()
                assert sync.push().updated == rollout.ids
                assert rollout.updates() == [num + 1 for num in num_updates]


def test_push_on_ray() -> None:
    with (
        make_scheduler("ray", address="local", num_cpus=4) as cluster,
        World(cluster, 1, 2) as world,
    ):
        for way in (ViaMemory(), ViaCollective()):
            world.step()
            assert world.sync(way, form=WeightFormat(checksum=True)).push().updated == world.ids
            assert not any(world.differing().values())
        places = {cluster.call_engine(id_, "memory") for id_ in world.ids}
        assert len(places) == 1


def test_rebuilt_instance_without_files_waits_for_update(
    engines_scheduler: Scheduler, tmp_path: Path
) -> None:
    """The missing files cost one restart, not the whole budget."""
    policy = SupervisionPolicy(
        probe_every_s=0.2, suspect_s=10.0, dead_s=60.0, max_restarts=1, restart_pause_s=0.1
    )
    with World(engines_scheduler, 1, 2, "-folder", supervision=policy) as world:
        sync = world.sync(ViaDisk(str(tmp_path / "weights")))
        world.step()
        sync.push()
        shutil.rmtree(tmp_path / "weights")
        os.kill(world.pid(world.ids[0]), KILL)
        wait_until(lambda: world.health()[0] is Health.STALE, "the instance is stale")
        world.step()
        report = sync.push()
        assert (report.updated, report.failed) == (world.ids, {})
        assert not any(world.differing().values())


def test_rollout_close_beside_a_hanging_trainer(engines_scheduler: Scheduler) -> None:
    with World(engines_scheduler, 1, 1, "-hanging", supervision=SUPERVISED) as world:
        world.sync().push()
        pid = world.pid(world.trainer.workers[0].id)
        stop(pid)
        with resumed(pid):
            world.rollout.close()
            assert world.rollout.role not in {
                status.worker_id.partition("/")[0] for status in engines_scheduler.status()
            }
