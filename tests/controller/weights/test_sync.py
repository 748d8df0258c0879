"""Tests of WeightSync with real engines in worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from helmsman import (
    HelmsmanError,
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    TrainController,
    make_scheduler,
)
from helmsman.api.errors import CallTimeoutError, MethodNotFoundError, RequestsInFlightError
from helmsman.api.weights import WeightFormat
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.sync import WeightSync
from helmsman.controller._weights.transport import ViaDisk
from helmsman.controller._weights.via_collective import ViaCollective
from helmsman.controller._weights.via_device import ViaDevice
from tests.contract.helpers import has_stopped, stop, wait_until
from tests.controller.sync_cases import (
    BUCKETS,
    check_changed_weights,
    check_damaged_file,
    check_failing_cast,
    check_mismatching_names,
    check_several_threads,
)
from tests.controller.sync_engines import KILL, STOP
from tests.controller.sync_world import PROMPT, SPEC, SUPERVISED, World, resumed, way_of

LONG = 1000
"""Number of tokens that take an instance longer than a test takes to stop it."""


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["memory", "disk", "collective"])
def test_push_updates_every_instance(way: str, world: World, tmp_path: Path) -> None:
    """Each of the two ranks holds a half of each parameter."""
    form = WeightFormat(bucket_bytes=4000, checksum=True)
    sync = world.sync(way_of(way, tmp_path), form=form)
    num_bytes = sum(tensor.nbytes for tensor in world.expected().values())
    for _ in range(2):
        version = world.step()
        assert all(world.differing().values())
        num_updates = world.updates()
        report = sync.push()
        assert (report.version, report.updated, report.failed) == (version, world.ids, {})
        assert num_bytes <= report.num_bytes < 1.5 * num_bytes
        assert not any(world.differing().values())
        assert world.rollout.versions() == dict.fromkeys(world.ids, version)
        assert world.updates() == [num + 1 for num in num_updates]
    if way == "memory":
        ((_, inode),) = {world.scheduler.call_engine(id_, "memory") for id_ in world.ids}
        assert inode > 0, "all instances read the same file in memory"


@pytest.mark.parametrize(
    ("way", "form", "message"),
    [
        ("collective", WeightFormat(names=((r"^.*$", "same"),)), "are both mapped to 'same' by"),
        ("memory", WeightFormat(dtype="float99"), "there is no floating-point type 'float99'"),
    ],
)
def test_push_refuses_an_invalid_format(
    way: str, form: WeightFormat, message: str, world: World, tmp_path: Path
) -> None:
    world.step()
    with pytest.raises(HelmsmanError, match=message):
        world.sync(way_of(way, tmp_path), form=form).push()
    assert all(world.differing().values())
    assert world.sync().push().updated == world.ids


def test_weight_format_maps_names_and_casts(world: World, tmp_path: Path) -> None:
    form = WeightFormat(dtype="bfloat16", names=(("^", "policy."), (r"\.weight$", ".w")))
    version = world.step()
    with pytest.raises(HelmsmanError, match="do not fit the rollout model"):
        world.sync(ViaDisk(str(tmp_path)), form=form).push()
    (file,) = tmp_path.glob(f"version-{version:010d}/*.safetensors")
    with safe_open(file, framework="pt") as written:
        found = {name: written.get_tensor(name) for name in written.keys()}  # noqa: SIM118 - no mapping
    expected = world.expected()
    assert found.keys() == {"policy." + re.sub(r"\.weight$", ".w", name) for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(found["policy." + re.sub(r"\.weight$", ".w", name)], tensor.bfloat16())
    cast = WeightFormat(dtype="bfloat16")
    report = world.sync(form=cast).push()
    assert 2 * report.num_bytes < 1.5 * sum(tensor.nbytes for tensor in expected.values())
    served = world.scheduler.call_engine(world.ids[1], "parameters")
    assert all(
        torch.equal(served[name], tensor.bfloat16().float()) for name, tensor in expected.items()
    )


def test_via_disk_keeps_the_last_versions(world: World, tmp_path: Path) -> None:
    sync = world.sync(ViaDisk(str(tmp_path), num_kept=2))
    for _ in range(3):
        version = world.step()
        sync.push()
    sync.push()  # the same version again
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"version-{v:010d}" for v in (version - 1, version)
    ]
    index = json.loads(
        (tmp_path / f"version-{version:010d}" / "model.safetensors.index.json").read_text()
    )
    assert set(index["weight_map"]) == set(world.expected())
    with pytest.raises(HelmsmanError, match="/proc/nowhere"):
        world.sync(ViaDisk("/proc/nowhere")).push()


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_push_with_requests_in_flight(in_flight: Any, world: World) -> None:
    sync = world.sync(in_flight=in_flight)
    before = sync.push().version
    after = world.step()
    sampling = SamplingParams(max_new_tokens=110, temperature=0.0)
    futures = [world.rollout.submit(PROMPT, sampling) for _ in range(6)]
    sync.push()
    results = [future.result(120) for future in futures]
    assert all(len(result.token_ids) == 110 for result in results)
    assert all(result.versions == sorted(result.versions) for result in results)
    versions = {version for result in results for version in result.versions}
    assert versions <= {before, after}
    assert versions == {before} if in_flight == "wait" else after in versions


def test_push_refuses_a_lower_version(world: World) -> None:
    sync = world.sync()
    last = sync.push().version
    world.trainer.set_version(last - 1)
    with pytest.raises(ValueError, match=f"weight version is {last - 1}; expected {last} or more"):
        sync.push()
    world.trainer.set_version(last + 1)
    assert sync.push().version == last + 1


def test_weight_sync_refuses_invalid_arguments(world: World) -> None:
    with make_scheduler("inline") as other, World(other, 1, 1) as alone:
        with pytest.raises(ValueError, match="run on two schedulers"):
            WeightSync(world.trainer, alone.rollout)
        for way in (ViaCollective(), ViaDevice()):
            with pytest.raises(ValueError, match="runs all workers in one; use ViaMemory"):
                alone.sync(way)
        alone.step()
        assert alone.sync().push().updated == ("rollout/0",)
        assert alone.differing() == {"rollout/0": []}
    with pytest.raises(ValueError, match="num_kept is 0; expected 1 or more"):
        ViaDisk("/tmp", num_kept=0)
    with pytest.raises(ValueError, match="bucket_bytes is 0; expected 1 or more"):
        WeightFormat(bucket_bytes=0)
    with pytest.raises(ValueError, match="names has '\\(', which is not a regular expression"):
        WeightFormat(names=(("(", ""),))
    for replacement in (r"\9", r"\g<what>"):
        with pytest.raises(ValueError, match="names cannot replace 'a' by"):
            WeightFormat(names=(("a", replacement),))


def test_push_names_an_engine_that_cannot_broadcast(engines_scheduler: Scheduler) -> None:
    jobs = {
        role: Job(role=role, replicas=1, tasks=[SPEC]) for role in ("other-train", "other-rollout")
    }
    engines = "tests.controller.engines"
    with (
        TrainController(
            engines_scheduler, f"{engines}.RecordingTrainer", jobs["other-train"]
        ) as trainer,
        RolloutController(
            engines_scheduler, f"{engines}.CountingRollout", jobs["other-rollout"]
        ) as rollout,
        pytest.raises(
            MethodNotFoundError,
            match="RecordingTrainer\\) has no public method 'open_weight_store'",
        ),
    ):
        WeightSync(trainer, rollout, ViaCollective()).push()


# --- faults; tests/nightly has each fault with the other transports -------------------------------


def test_push_of_mismatching_names(world: World, tmp_path: Path) -> None:
    check_mismatching_names("collective", world, tmp_path)


def test_push_with_a_failing_cast_releases_all_ranks(world: World, tmp_path: Path) -> None:
    check_failing_cast("collective", world, tmp_path)


@pytest.mark.parametrize("way", ["collective", "update_rollout"])
def test_push_refuses_weights_that_changed(way: str, world: World, tmp_path: Path) -> None:
    check_changed_weights(way, world, tmp_path)


def test_via_disk_damaged_file_makes_readers_stale(world: World, tmp_path: Path) -> None:
    check_damaged_file("keep", world, tmp_path)


def test_push_from_several_threads(world: World, tmp_path: Path) -> None:
    check_several_threads("collective", world, tmp_path)


def test_via_collective_without_an_instance_that_refuses(world: World) -> None:
    able, unable = world.ids
    sync = world.sync(ViaCollective(timeout=5.0))
    world.step()
    world.scheduler.call_engine(unable, "refuse_updates", None, True)
    try:
        report = sync.push()
        assert report.updated == (able,)
        assert "this engine cannot read them" in report.failed[unable]
        assert world.health() == [Health.HEALTHY, Health.STALE]
    finally:
        world.scheduler.call_engine(unable, "refuse_updates", None, False)
    assert sync.push().updated == world.ids


def test_via_collective_without_members_that_fail(engines_scheduler: Scheduler) -> None:
    """One instance dies in a broadcast; in a later sync, another one stops."""
    with World(engines_scheduler, 1, 3, "-failing", supervision=SUPERVISED) as world:
        first, killed, stopped = world.ids
        sync = world.sync(ViaCollective(timeout=3600.0), form=BUCKETS)
        world.step()
        assert sync.push().updated == world.ids
        world.step()
        world.scheduler.call_engine(killed, "fail_in_next_update", None, KILL, 4)
        for each in (sync, world.sync()):  # a later attempt reports the death, too
            report = each.push(timeout=60)
            assert (report.updated, set(report.failed)) == ((first, stopped), {killed})
            assert each is not sync or "SIGKILL" in report.failed[killed]
        assert not any(world.differing([first, stopped]).values())

        sync = world.sync(ViaCollective(timeout=5.0))
        world.step()
        world.scheduler.call_engine(stopped, "fail_in_next_update", None, STOP)
        with resumed(world.pid(stopped)):
            assert sync.push().updated == (first,)
            assert not any(world.differing([first]).values())
            assert world.health()[1] is Health.DEAD
            assert world.health()[2] is not Health.HEALTHY
            assert len(world.rollout.generate([PROMPT] * 4)) == 4


def test_via_collective_after_a_timeout(world: World) -> None:
    """The trainer is free again soon, and the next group has no member of the previous one."""
    last = world.ids[1]
    sync = world.sync(ViaCollective(timeout=300.0))
    world.step()
    sync.push()
    world.step()
    world.scheduler.call_engine(last, "fail_in_next_update", None, STOP)
    with resumed(world.pid(last)):
        with pytest.raises(HelmsmanError):
            sync.push(timeout=5)
        for worker in world.trainer.workers:
            world.scheduler.call_engine(worker.id, "get_version", rpc_timeout=100)
    num_updates = world.updates()
    assert sync.push(timeout=100).updated == world.ids
    assert world.updates() == [num + 1 for num in num_updates]
    assert not any(world.differing().values())


def test_via_collective_with_a_dead_trainer_rank(world: World) -> None:
    """Instances learn of the death from rank 0, long before their own timeout."""
    sync = world.sync(ViaCollective(timeout=300.0))
    world.step()
    sync.push()
    os.kill(world.pid(world.trainer.workers[1].id), KILL)
    with pytest.raises(HelmsmanError) as caught:
        sync.push()
    assert not isinstance(caught.value, CallTimeoutError)
    world.trainer.recover()
    assert sync.push(timeout=100).updated == world.ids
    assert not any(world.differing().values())


def test_push_cancelled_leaves_no_memory(world: World) -> None:
    """The trainer keeps only the copies of the version that is served."""
    sync = world.sync()
    world.step()
    sync.push()
    found: list[int] = []
    for _ in range(3):
        asyncio.run(_cancel_push(world, sync))
        found.append(world.num_segments())
    assert found[1:] == found[:-1]
    assert sync.push().updated == world.ids
    for _ in range(3):
        version = world.trainer.get_version()
        world.trainer.set_version(version - 1)
        for push in (sync.push, lambda: world.trainer.update_rollout(world.rollout)):
            with pytest.raises(ValueError, match="weight version is"):
                push()
        world.trainer.set_version(version)
        found.append(world.num_segments())
    assert len(set(found)) == 1
    assert not any(world.differing().values())


async def _cancel_push(world: World, sync: WeightSync) -> None:
    """Cancel a push when the first instance is updated and the last one has received a part."""
    first, last = world.ids
    pid = world.pid(last)
    version = world.step()
    world.scheduler.call_engine(last, "fail_in_next_update", None, STOP)
    pushing = asyncio.ensure_future(sync.async_push())
    with resumed(pid):
        await asyncio.to_thread(wait_until, lambda: has_stopped(pid), "the last has stopped")
        await asyncio.to_thread(
            wait_until,
            lambda: world.scheduler.call_engine(first, "get_version") == version,
            "the first instance is updated",
        )
        # Its reply follows at once; the tasks that await it are done a few turns of the loop later.
        for _ in range(500):
            await world.rollout.async_stats()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
    # A reply of the last instance shows that its update is over.
    await asyncio.to_thread(world.rollout.versions)


def test_push_cancelled_moves_requests_elsewhere(world: World) -> None:
    last = world.ids[1]
    sync = world.sync()
    sync.push()
    num_aborts = world.scheduler.call_engine(last, "aborts")
    sampling = SamplingParams(max_new_tokens=LONG)
    futures = [world.rollout.submit(PROMPT, sampling) for _ in range(4)]
    asyncio.run(_cancel_push(world, sync))
    assert world.health()[1] is Health.STALE
    wait_until(
        lambda: world.scheduler.call_engine(last, "aborts") > num_aborts, "requests are aborted"
    )
    assert [len(future.result(120).token_ids) for future in futures] == [LONG] * 4
    assert sync.push().updated == world.ids


def test_push_reports_requests_that_do_not_end(world: World) -> None:
    last = world.ids[1]
    pid = world.pid(last)
    sampling = SamplingParams(max_new_tokens=110)
    stop(pid)
    with resumed(pid):
        futures = [world.rollout.submit(PROMPT, sampling) for _ in range(8)]
        assert set(world.sync().push(timeout=1.0).failed) == {last}
        wait_until(
            lambda: not world.rollout.stats().instances[world.ids[0]].num_in_flight,
            "the requests of the first instance have ended",
        )
        for in_flight in ("wait", "abort"):
            sync = world.sync(in_flight=in_flight)
            message = (
                rf"an update of the weights with in_flight='{in_flight}' has waited 0\.\d+ s .*: "
                rf"{last} has \d. \d are queued"
            )
            with pytest.raises(RequestsInFlightError, match=message):
                sync.push(timeout=0.5)
            assert not world.rollout.stats().paused
    assert [len(future.result(120).token_ids) for future in futures] == [110] * 8
    assert world.sync().push().updated == world.ids
