"""Weights from a trainer's ranks to rollout instances, with real engines in real processes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
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
from helmsman.api.errors import MethodNotFoundError
from helmsman.api.weights import WeightFormat, WeightsOnDisk
from helmsman.controller._generation.health import Health
from helmsman.controller._weight_sync.sync import WeightSync
from helmsman.controller._weight_sync.via_collective import ViaCollective
from helmsman.controller._weight_sync.via_storage import ViaDisk, ViaMemory
from tests.controller.sync_engines import KILL, STOP
from tests.controller.sync_world import (
    PROMPT,
    SPEC,
    SUPERVISED,
    SharedWorld,
    World,
    going_on,
    way_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: Scheduler) -> Scheduler:
    return engines_scheduler


@pytest.fixture(scope="module")
def shared(scheduler: Scheduler) -> Iterator[dict[str, SharedWorld]]:
    with contextlib.ExitStack() as stack:
        shared = {
            "pair": SharedWorld(lambda: World(scheduler, 2, 2)),
            "supervised": SharedWorld(
                lambda: World(scheduler, 1, 4, "-supervised", supervision=SUPERVISED)
            ),
        }
        for each in shared.values():
            stack.callback(each.close)
        yield shared


@pytest.fixture
def pair(shared: dict[str, SharedWorld]) -> Iterator[World]:
    with shared["pair"].lent() as world:
        yield world


@pytest.fixture
def supervised(shared: dict[str, SharedWorld]) -> Iterator[World]:
    with shared["supervised"].lent() as world:
        yield world


@pytest.mark.parametrize("world", ["pair", "supervised"])
@pytest.mark.parametrize("way", ["memory", "disk", "collective"])
def test_push_updates_every_instance(
    way: str, world: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From two ranks that have a half of each parameter, and from one."""
    it: World = request.getfixturevalue(world)
    form = WeightFormat(bucket_bytes=4000, checksum=True)
    sync = it.sync(way_of(way, tmp_path), form=form)
    num_bytes = sum(tensor.nbytes for tensor in it.expected().values())
    for _ in range(2):
        version = it.step()
        assert all(it.differing().values())
        num_updates = it.updates()
        report = sync.push()
        assert (report.version, report.updated, report.failed) == (version, it.ids, {})
        assert num_bytes <= report.num_bytes < 1.5 * num_bytes
        assert not any(it.differing().values())
        assert it.rollout.versions() == dict.fromkeys(it.ids, version)
        assert it.updates() == [num + 1 for num in num_updates]
    if way == "memory":
        ((_, inode),) = {it.scheduler.call_engine(id_, "memory") for id_ in it.ids}
        assert inode > 0, "of one file in memory, which all read"


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


@pytest.mark.parametrize(
    ("way", "form", "message"),
    [
        *(
            (
                way,
                WeightFormat(names=((r"^.*$", "same"),)),
                "are both mapped to 'same' by WeightFormat.names",
            )
            for way in ("memory", "disk", "collective")
        ),
        ("memory", WeightFormat(dtype="float99"), "there is no floating-point type 'float99'"),
    ],
)
def test_push_refuses_an_invalid_format(
    way: str, form: WeightFormat, message: str, pair: World, tmp_path: Path
) -> None:
    pair.step()
    with pytest.raises(HelmsmanError, match=message):
        pair.sync(way_of(way, tmp_path), form=form).push()
    assert all(pair.differing().values())
    assert pair.sync().push().updated == pair.ids


@pytest.mark.parametrize("way", ["memory", "disk", "collective"])
def test_push_of_another_models_weights(way: str, pair: World, tmp_path: Path) -> None:
    pair.step()
    wrong = WeightFormat(names=(("embed_tokens", "embedding"),))
    carrier = way_of(way, tmp_path)
    with pytest.raises(
        HelmsmanError,
        match="which is unchanged. 1 missing: model.embed_tokens.weight; 1 unexpected",
    ):
        pair.sync(carrier, form=wrong).push()
    assert all(pair.differing().values())
    assert pair.health() == [Health.STALE, Health.STALE]
    assert pair.sync(carrier).push().updated == pair.ids
    assert not any(pair.differing().values())
    assert len(pair.rollout.generate([PROMPT])[0].token_ids) > 0


def test_weight_format_maps_names_and_casts(pair: World, tmp_path: Path) -> None:
    form = WeightFormat(dtype="bfloat16", names=(("^", "policy."), (r"\.weight$", ".w")))
    version = pair.step()
    with pytest.raises(HelmsmanError, match="do not fit the rollout model"):
        pair.sync(ViaDisk(str(tmp_path)), form=form).push()
    (file,) = tmp_path.glob(f"version-{version:010d}/*.safetensors")
    with safe_open(file, framework="pt") as written:
        # It is no mapping
        found = {name: written.get_tensor(name) for name in written.keys()}  # noqa: SIM118
    expected = pair.expected()
    assert found.keys() == {"policy." + re.sub(r"\.weight$", ".w", name) for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(found["policy." + re.sub(r"\.weight$", ".w", name)], tensor.bfloat16())
    cast = WeightFormat(dtype="bfloat16")
    report = pair.sync(form=cast).push()
    assert 2 * report.num_bytes < 1.5 * sum(tensor.nbytes for tensor in expected.values())
    served = pair.scheduler.call_engine(pair.ids[1], "parameters")
    assert all(
        torch.equal(served[name], tensor.bfloat16().float()) for name, tensor in expected.items()
    )


def test_via_disk_keeps_the_last_versions(pair: World, tmp_path: Path) -> None:
    sync = pair.sync(ViaDisk(str(tmp_path), num_kept=2))
    for _ in range(3):
        version = pair.step()
        sync.push()
    sync.push()  # the same version once more
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"version-{v:010d}" for v in (version - 1, version)
    ]
    index = json.loads(
        (tmp_path / f"version-{version:010d}" / "model.safetensors.index.json").read_text()
    )
    assert set(index["weight_map"]) == set(pair.expected())


def test_via_disk_folder_that_cannot_be_written(pair: World) -> None:
    with pytest.raises(HelmsmanError, match="/proc/nowhere"):
        pair.sync(ViaDisk("/proc/nowhere")).push()
    version = pair.step()
    assert pair.sync().push().version == version


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_push_with_requests_in_flight(in_flight: Any, pair: World) -> None:
    sync = pair.sync(in_flight=in_flight)
    before = sync.push().version
    after = pair.step()
    sampling = SamplingParams(max_new_tokens=110, temperature=0.0)
    futures = [pair.rollout.submit(PROMPT, sampling) for _ in range(6)]
    sync.push()
    results = [future.result(120) for future in futures]
    assert all(len(result.token_ids) == 110 for result in results)
    assert all(result.versions == sorted(result.versions) for result in results)
    assert {version for result in results for version in result.versions} <= {before, after}
    if in_flight == "wait":
        assert {version for result in results for version in result.versions} == {before}
    else:
        assert any(after in result.versions for result in results)


def test_push_refuses_a_lower_version(pair: World) -> None:
    sync = pair.sync()
    last = sync.push().version
    pair.trainer.set_version(last - 1)
    with pytest.raises(ValueError, match=f"weight version is {last - 1}; expected {last} or more"):
        sync.push()
    pair.trainer.set_version(last + 1)
    assert sync.push().version == last + 1


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_via_disk_damaged_file_makes_readers_stale(
    in_flight: Any, supervised: World, tmp_path: Path
) -> None:
    """What it has waits meanwhile, and goes on by whole weights."""
    form = WeightFormat(bucket_bytes=4000, checksum=True)
    sync = supervised.sync(ViaDisk(str(tmp_path)), form=form, in_flight=in_flight)
    version = supervised.step()
    sync.push()
    (folder,) = tmp_path.iterdir()
    written = sorted(folder.glob("*.safetensors"))
    assert len(written) > 2
    data = bytearray(written[-1].read_bytes())
    data[-3] ^= 1
    written[-1].write_bytes(data)
    futures = [
        supervised.rollout.submit(PROMPT, SamplingParams(max_new_tokens=110))
        for _ in supervised.ids
    ]
    with pytest.raises(
        HelmsmanError,
        match=r"updated only in part: ValueError: \d of \d+ parameters have wrong checksums",
    ):
        supervised.rollout.update_weights(WeightsOnDisk(str(folder)), version + 1)
    assert set(supervised.health()) == {Health.STALE}
    supervised.trainer.set_version(version + 2)
    assert sync.push(timeout=120).updated == supervised.ids
    for result in [future.result(60) for future in futures]:
        assert len(result.token_ids) == 110
        assert set(result.versions) <= {version, version + 2}
        assert result.versions == sorted(result.versions)


def test_via_collective_without_members_that_fail(supervised: World) -> None:
    """One dies and, in a later sync, one stands still."""
    first, killed, stopped, last = supervised.ids
    sync = supervised.sync(ViaCollective(timeout=5.0))
    supervised.step()
    assert sync.push().updated == supervised.ids
    supervised.step()
    supervised.scheduler.call_engine(killed, "fail_in_next_update", None, KILL)
    for each in (sync, supervised.sync()):  # a later attempt reports it, too
        report = each.push()
        assert (report.updated, set(report.failed)) == ((first, stopped, last), {killed})
        assert each is not sync or "SIGKILL" in report.failed[killed]
    assert not any(supervised.differing([first, stopped, last]).values())

    supervised.step()
    supervised.scheduler.call_engine(stopped, "fail_in_next_update", None, STOP)
    with going_on(supervised.pid(stopped)):
        assert sync.push().updated == (first, last)
        assert not any(supervised.differing([first, last]).values())
        assert supervised.health()[1] is Health.DEAD
        assert supervised.health()[2] is not Health.HEALTHY
        assert len(supervised.rollout.generate([PROMPT] * 4)) == 4


@pytest.mark.parametrize(
    "place",
    [None, 0, 2, 4, -1],
    ids=["joining", "first header", "header of a bucket", "bytes of a bucket", "end"],
)
def test_via_collective_member_killed(place: int | None, supervised: World) -> None:
    """The others go on at once, not only after the limit for which members wait."""
    killed, *others = supervised.ids
    sync = supervised.sync(ViaCollective(timeout=3600.0), form=WeightFormat(bucket_bytes=4000))
    supervised.step()
    assert sync.push().updated == supervised.ids
    if place == -1:
        place += supervised.scheduler.call_engine(killed, "num_broadcasts", None)
    supervised.step()
    supervised.scheduler.call_engine(killed, "fail_in_next_update", None, KILL, place)
    report = sync.push(timeout=60)
    assert (report.updated, set(report.failed)) == (tuple(others), {killed})
    assert "SIGKILL" in report.failed[killed]
    assert not any(supervised.differing(others).values())
    supervised.step()
    assert sync.push(timeout=60).updated == tuple(others)


def test_weight_sync_refuses_invalid_arguments(pair: World) -> None:
    with make_scheduler("inline") as other, World(other, 1, 1) as alone:
        with pytest.raises(ValueError, match="run on two schedulers"):
            WeightSync(pair.trainer, alone.rollout)
        with pytest.raises(ValueError, match="runs all workers in one; use ViaMemory"):
            alone.sync(ViaCollective())
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


def test_push_names_an_engine_that_cannot_publish(scheduler: Scheduler) -> None:
    jobs = {
        role: Job(role=role, replicas=1, tasks=[SPEC]) for role in ("other-train", "other-rollout")
    }
    trainer = TrainController(
        scheduler, "tests.controller.engines.RecordingTrainer", jobs["other-train"], ("critic",)
    )
    rollout = RolloutController(
        scheduler, "tests.controller.engines.CountingRollout", jobs["other-rollout"]
    )
    with trainer, rollout:
        trainer.initialize()
        rollout.initialize()
        with pytest.raises(
            MethodNotFoundError, match="RecordingTrainer\\) has no public method 'publish_weights'"
        ):
            WeightSync(trainer, rollout).push()
