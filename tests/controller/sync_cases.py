"""Checks of weight syncs that run one way by day and the other ways by night."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from helmsman import HelmsmanError, SamplingParams
from helmsman.api.weights import WeightFormat, WeightsOnDisk
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.sync import SyncReport
from helmsman.controller._weights.transport import ViaDisk
from helmsman.controller._weights.via_collective import ViaCollective
from tests.controller.sync_engines import KILL
from tests.controller.sync_world import PROMPT, World, way_of

InFlight = Literal["keep", "wait", "abort"]
BUCKETS = WeightFormat(bucket_bytes=4000)


def check_mismatching_names(way: str, world: World, folder: Path) -> None:
    """Instances refuse weights whose names do not match, and take the next ones."""
    world.step()
    wrong = WeightFormat(names=(("embed_tokens", "embedding"),))
    transport = way_of(way, folder)
    with pytest.raises(
        HelmsmanError,
        match="which is unchanged. 1 missing: model.embed_tokens.weight; 1 unexpected",
    ):
        world.sync(transport, form=wrong).push()
    assert all(world.differing().values())
    assert world.health() == [Health.STALE, Health.STALE]
    assert world.sync(transport).push().updated == world.ids
    assert not any(world.differing().values())
    assert len(world.rollout.generate([PROMPT])[0].token_ids) > 0


def check_failing_cast(way: str, world: World, folder: Path) -> None:
    """An error on one rank releases its peers and the instances that wait for the first bucket."""
    world.step()
    form = WeightFormat(dtype="float4_e2m1fn_x2")  # torch has this type, but casts nothing to it
    with pytest.raises(HelmsmanError, match="(?i)float4"):
        world.sync(way_of(way, folder), form=form).push(timeout=60)
    assert all(world.differing().values())
    assert world.sync(way_of(way, folder)).push(timeout=60).updated == world.ids
    assert not any(world.differing().values())


def check_changed_weights(way: str, world: World, folder: Path) -> None:
    """A push fails if another thread makes a step between the version and the weights."""
    before = world.sync().push().version
    version = world.step()
    for worker in world.trainer.workers:
        world.scheduler.call_engine(worker.id, "step_after_next_version")
    push: Callable[[], Any] = (
        (lambda: world.trainer.update_rollout(world.rollout))
        if way == "update_rollout"
        else world.sync(way_of(way, folder)).push
    )
    with pytest.raises(HelmsmanError, match=f"weight version {version + 1}.*{version}"):
        push()
    assert all(world.differing().values())
    assert set(world.rollout.versions().values()) == {before}
    push()
    assert world.rollout.versions() == dict.fromkeys(world.ids, version + 1)
    assert not any(world.differing().values())


def check_damaged_file(in_flight: InFlight, world: World, folder: Path) -> None:
    """Requests of instances that read a damaged file wait for the next whole weights."""
    form = WeightFormat(bucket_bytes=4000, checksum=True)
    sync = world.sync(ViaDisk(str(folder)), form=form, in_flight=in_flight)
    version = world.step()
    sync.push()
    (written,) = folder.iterdir()
    files = sorted(written.glob("*.safetensors"))
    assert len(files) > 2
    data = bytearray(files[-1].read_bytes())
    data[-3] ^= 1
    files[-1].write_bytes(data)
    sampling = SamplingParams(max_new_tokens=110)
    futures = [world.rollout.submit(PROMPT, sampling) for _ in world.ids]
    with pytest.raises(
        HelmsmanError,
        match=r"updated only in part: ValueError: \d of \d+ parameters have wrong checksums",
    ):
        world.rollout.update_weights(WeightsOnDisk(str(written)), version + 1)
    assert set(world.health()) == {Health.STALE}
    world.trainer.set_version(version + 2)
    assert sync.push(timeout=120).updated == world.ids
    for result in [future.result(60) for future in futures]:
        assert len(result.token_ids) == 110
        assert set(result.versions) <= {version, version + 2}
        assert result.versions == sorted(result.versions)


def check_member_killed(place: int | None, world: World) -> None:
    """The other members continue at once when one dies before a broadcast.

    Args:
        place: Broadcasts before the death; -1 for all but one, None to join no group.
        world: A world of which an instance dies.
    """
    *others, killed = world.ids
    sync = world.sync(ViaCollective(timeout=3600.0), form=BUCKETS)
    world.step()
    assert sync.push().updated == world.ids
    if place == -1:
        place += world.scheduler.call_engine(killed, "num_broadcasts", None)
    world.step()
    world.scheduler.call_engine(killed, "fail_in_next_update", None, KILL, place)
    report = sync.push(timeout=60)
    assert (report.updated, set(report.failed)) == (tuple(others), {killed})
    assert "SIGKILL" in report.failed[killed]
    assert not any(world.differing(others).values())
    world.step()
    report = sync.push(timeout=60)
    assert (report.updated, set(report.failed)) == (tuple(others), {killed})


def check_several_threads(way: str, world: World, folder: Path) -> None:
    """Pushes from several threads at once run one after another."""
    sync = world.sync(way_of(way, folder))
    barrier = threading.Barrier(3)

    def push(_: int) -> SyncReport:
        barrier.wait(60)
        return sync.push(timeout=100)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            world.step()
            num_updates = world.updates()
            reports = list(threads.map(push, range(3)))
            assert [report.updated for report in reports] == [world.ids] * 3
            assert world.updates() == [num + 3 for num in num_updates]
            assert not any(world.differing().values())
