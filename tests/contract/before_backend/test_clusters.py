"""Worker groups: dispatch, calls, checks of the topology, and refusals."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmsman.api import errors
from helmsman.api.batch import Batch
from helmsman.api.dispatch import Replicate, Shard
from helmsman.api.parts import PerPart
from helmsman.api.scheduler import Scheduler, WorkerState
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from tests.contract.group_workers import (
    AsRecord,
    Frozen,
    Member,
    Plain,
    WithAMetaclass,
    WithItsOwnView,
)
from tests.contract.groups import ON_CPU, Members, rows
from tests.contract.helpers import LIMIT_S, interrupted_when, wait_until

# --- declared calls -------------------------------------------------------------------------------


def test_dispatch_rows_over_dp(members: Members) -> None:
    joined = members.add(rows(6), number=10)
    assert joined is not None
    assert joined["x"].tolist() == [110, 111, 112, 113, 114, 115]
    assert joined["rank"] == [4, 4, 4, 6, 6, 6]  # tp 0 of the last stage, in dp order
    assert dict(joined.meta) == {"dp": PerPart((0, 1)), "same": True}


def test_dispatch_modes(members: Members) -> None:
    value = list(range(8))  # its length equals the world size
    assert members.echo(value) == [value] * 8
    assert members.method(Member.aecho)(value) == [value] * 8
    assert members.method(Member.rank_of_one)() == 0
    assert members.method(Member.rank_of_zero)() == 0
    assert members.method(Member.own)(value) == [(rank, rank) for rank in value]  # type: ignore[arg-type]
    assert members.method(Member.padded_add)(rows(5)).tolist() == [1, 2, 3, 4, 5]  # type: ignore[arg-type]
    assert members.method(Member.metrics)(rows(5)) == [
        {"rows": 3, "rank": 4},
        {"rows": 2, "rank": 6},
    ]
    assert members.method(Member.over_two_axes)(value) == value
    assert members.method(Member.first_only)(rows(4))["x"].tolist() == []  # type: ignore[index]
    assert members.method(Member.num_stored)() == [2, -1, 2, -1, -1, -1, -1, -1]


def test_dispatch_of_meta_to_all(members: Members) -> None:
    batch = Batch({"x": np.arange(4)}, {"step": 3})
    assert members.method(Member.meta_everywhere)(batch) == 4
    meta = {"step": 3}
    assert members.method(Member.stored_rows_and_meta)() == [
        *[(2, meta), (0, meta), (2, meta), (0, meta)],
        *[(0, meta)] * 4,
    ]
    with members.make.keep(2) as kept:
        assert members.method(Member.meta_everywhere)(kept) == 4


def test_submit(members: Members) -> None:
    futures = [members.add.submit(rows(4), number) for number in range(3)]
    assert [future.result(LIMIT_S)["x"][0] for future in futures] == [100, 101, 102]  # type: ignore[index]
    assert all(future.done() for future in futures)
    assert futures[0].result() is futures[0].result()

    async def awaited() -> list[Any]:
        return await asyncio.gather(
            *(_awaited(members.add.submit(rows(4), number)) for number in range(3))
        )

    assert [batch["x"][0] for batch in asyncio.run(awaited())] == [100, 101, 102]
    failing = members.fail_on.submit([2], "no")
    assert isinstance(failing.exception(LIMIT_S), errors.GroupCallError)
    with pytest.raises(errors.GroupCallError):
        failing.result()


def test_futures_of_ranks(members: Members, tmp_path: Path) -> None:
    release = tmp_path / "release"
    call = members.method(Member.wait_on).submit([1], str(release))
    futures = list(call)
    assert len(futures) == len(list(call)) == 8
    assert [futures[rank].result(LIMIT_S) for rank in (0, 2)] == [0, 2]
    assert not futures[1].done() and not call.done(), "rank 1 still runs"
    release.touch()
    assert futures[1].result(LIMIT_S) == call.result(LIMIT_S)[1] == 1

    async def gathered() -> list[Any]:
        return await asyncio.gather(*members.execute_all_async("echo", 3))

    assert asyncio.run(gathered()) == [3] * 8
    joined = members.add.submit(rows(4), 0)
    assert [part.result(LIMIT_S)["rank"] for part in joined] == [[4, 4], [6, 6]]


def test_futures_of_failing_ranks(members: Members) -> None:
    call = members.fail_on.submit([2], "no")
    failed = list(call)[2].exception(LIMIT_S)
    assert isinstance(failed, errors.EngineCallError) and "no" in str(failed)
    assert isinstance(call.exception(LIMIT_S), errors.GroupCallError)
    for future in call:
        error = future.exception(LIMIT_S)
        assert error is None or isinstance(error, errors.CallError | errors.GroupCallError)
    cancelled = members.echo.submit(1)
    futures = list(cancelled)
    futures[0].cancel()
    assert [future.result(LIMIT_S) for future in futures[1:]] == [1] * 7
    assert cancelled.result(LIMIT_S) == [1] * 8


async def _awaited(future: Any) -> Any:
    return await future


def test_submit_keeps_order(members: Members) -> None:
    large = Batch({"x": np.zeros((2, 300_000))})
    futures = [members.echo.submit(large if number % 2 else number) for number in range(6)]
    [future.result(LIMIT_S) for future in futures]
    assert [future.result()[7] for future in futures[::2]] == [0, 2, 4]


# --- calls by name --------------------------------------------------------------------------------


def test_execute_by_name(make_cluster: Callable[..., Members], resources: ResourceManager) -> None:
    group: Cluster[Any] = Cluster(
        "plain",
        Plain,
        resources,
        ClusterConfig(world_size=4, tp_size=2, num_cpus=0.5),
        kwargs={"text": "t"},
    )
    with group:
        value = [1, 2, 3, 4]
        assert (
            group.execute_all_sync("tell", value, key=value)
            == [("t", (value,), {"key": value})] * 4
        )
        assert group.execute_all_sync("tell", Shard(value), Replicate(value)) == [
            ("t", (value[:2] if rank < 2 else value[2:], value), {}) for rank in range(4)
        ]
        assert group.execute_all_sync("tell", key=Shard(value, "tp")) == [
            ("t", (), {"key": value[2:] if rank % 2 else value[:2]}) for rank in range(4)
        ]
        assert group.execute_rank_zero_sync("tell", 1, timeout=LIMIT_S) == ("t", (1,), {})
        assert group.execute_rank_zero_async("tell", 2).result() == ("t", (2,), {})
        assert group.execute_all_async("tell", 3).result() == [("t", (3,), {})] * 4
        assert group.execute_on([3, 1], "tell", Shard(value)) == [
            ("t", ([3, 4],), {}),
            ("t", ([1, 2],), {}),
        ]
        assert group.execute_on(np.array([1, 0]), "tell", 1) == [("t", (1,), {})] * 2  # type: ignore[arg-type]
        future = group.execute_on_async([2, 0], "tell", 1)
        assert [each.result(LIMIT_S) for each in future] == [("t", (1,), {})] * 2
        assert future.result(LIMIT_S) == [("t", (1,), {})] * 2
        for wrong in ([], [1, 1]):
            with pytest.raises(ValueError, match="expected at least one and no duplicates"):
                group.execute_on(wrong, "tell")
        with pytest.raises(errors.UnevenBatchError, match=r"plain.tell: argument 0 of 3 rows"):
            group.execute_all_sync("tell", Shard([1, 2, 3]))
        with pytest.raises(errors.GroupCallError, match="has no public method 'told'"):
            group.execute_all_sync("told")
    with pytest.raises(errors.HelmsmanError, match="is closed"):
        group.execute_all_sync("tell")


@pytest.mark.parametrize(
    "worker_cls", [Frozen, WithAMetaclass, AsRecord, "tests.contract.group_workers.Frozen"]
)
def test_worker_class(make_cluster: Callable[..., Members], worker_cls: Any) -> None:
    """The class may be frozen, have a metaclass, be a msgspec.Struct, or be given as a path."""
    assert make_cluster(worker_cls, 7, world_size=2).execute_all_sync("tell") == [(7, 0), (7, 1)]


def test_worker_class_ray_or_invalid(
    make_cluster: Callable[..., Members], resources: ResourceManager
) -> None:
    ray = pytest.importorskip("ray")
    group = make_cluster(ray.remote(Plain), world_size=2)
    assert group.execute_all_sync("tell", 1) == [("", (1,), {})] * 2
    with pytest.raises(
        TypeError, match="worker_cls is a class, a Ray actor class or an import path; got int"
    ):
        make_cluster(7, name="seven", world_size=1)
    assert "seven" not in resources.allocations


def test_call_arguments_named_as_schedulers(members: Members, resources: ResourceManager) -> None:
    named = {"timeout": 5, "method": "m", "worker_id": 3}
    assert members.method(Member.with_names_of_calls)(**named) == [(5, "m", 3)] * 8  # type: ignore[arg-type]
    config = ClusterConfig(world_size=1, num_cpus=0.5)
    with Cluster("named", Plain, resources, config, kwargs={"text": "t", "engine": "e"}) as group:  # type: ignore[var-annotated]
        assert group.execute_all_sync("tell", worker_id=0, engine_name=1) == [
            ("te", (), {"worker_id": 0, "engine_name": 1})
        ]


def test_register_refuses_cluster_names() -> None:
    for name in ("close", "name", "workers", "topology"):
        with pytest.raises(
            errors.DispatchError,
            match=f"a Cluster already has an attribute '{name}', which Member.echo would hide",
        ):
            type("Hiding", (Cluster,), {name: Member.echo})


def test_method_refuses_undeclared(members: Members) -> None:
    undeclared: Any = Plain.tell
    for wrong in (undeclared, "echo", Member):
        with pytest.raises(
            TypeError, match="expected a method declared by register.*execute_all_sync"
        ):
            members.method(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a method declared by register"):
        members.execute_all_sync(undeclared)


def test_interrupt_reaches_each_wait(members: Members, tmp_path: Path) -> None:
    release = tmp_path / "release"
    waits: list[Callable[[], Any]] = [
        lambda: members.method(Member.wait_on)([2], str(release)),
        lambda: members.method(Member.wait_on).keep([2], str(release)),
        lambda: members.execute_all_sync("wait_on", [2], str(release)),
        lambda: members.method(Member.wait_on).submit([2], str(release)).exception(),
    ]
    for wait in waits:
        with interrupted_when(Path(f"{release}.2").exists, "rank 2 has begun"):
            wait()
        release.touch()
        assert members.echo(1) == [1] * 8
        release.unlink()
        Path(f"{release}.2").unlink()


def test_callback_waiting_for_own_loop(members: Members, tmp_path: Path) -> None:
    raised: list[BaseException | None] = []
    called = threading.Event()

    def callback(_: object) -> None:
        try:
            members.echo(2)
        except RuntimeError as error:
            raised.append(error)
        finally:
            called.set()

    release = tmp_path / "release"
    members.method(Member.wait_on).submit([1], str(release)).add_done_callback(callback)
    release.touch()
    assert called.wait(LIMIT_S) and "which would wait for itself" in str(raised[0])
    assert members.echo(3) == [3] * 8


# --- values ---------------------------------------------------------------------------------------


class Counted:
    """Counts how often it is pickled."""

    num_pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.num_pickled += 1
        return list, ((1, 2),)


def test_value_pickled_once_for_ranks(members: Members) -> None:
    Counted.num_pickled = 0
    assert members.echo(Counted()) == [[1, 2]] * 8
    assert Counted.num_pickled == 1
    large = [Counted(), np.zeros(1 << 17)]
    assert [value[0] for value in members.echo(large)] == [[1, 2]] * 8
    assert Counted.num_pickled == 2


def test_argument_unserializable(make_cluster: Callable[..., Members]) -> None:
    group = make_cluster(world_size=2)
    with pytest.raises(errors.ArgumentNotSerializableError, match=r"args\[0\]\['lock'\]"):
        group.echo({"lock": threading.Lock()})
    with pytest.raises(
        errors.ArgumentNotSerializableError, match=r"args\[0\]<part 1> \(a _thread.lock\)"
    ):
        group.method(Member.own)([1, threading.Lock()])  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentNotSerializableError, match=r"args\[0\]\[3\]\['lock'\]"):
        group.method(Member.summed)([1, 2, 3, {"lock": threading.Lock()}])  # type: ignore[list-item]
    assert group.method(Member.steps)() == [0, 0]
    assert [status.health.num_calls for status in group.health() if status.health] == [1, 1]


def test_keep_refuses_custom_collection(make_cluster: Callable[..., Members]) -> None:
    group = make_cluster(world_size=2)
    for method in (Member.summed, Member.custom):
        with pytest.raises(
            errors.DispatchError, match="Call it without keep, or declare Collect.LIST"
        ):
            group.method(method).keep([1, 2])
        assert group.method(method)([1, 2]) == 3
    assert group.make.options(keep=True).submit(2).result()["x"].tolist() == [0, 1, 2, 3]
    assert [status.health.num_calls for status in group.health() if status.health] == [3, 3]


@pytest.mark.parametrize(("instead", "kind"), [(None, "NoneType"), ([1, 2], "list")])
def test_keep_joins_like_results(
    make_cluster: Callable[..., Members], instead: Any, kind: str
) -> None:
    """A kept batch is never one that lacks the rows of a part."""
    group = make_cluster(world_size=2)
    for call in (group.method(Member.all_but_one_part), group.method(Member.all_but_one_part).keep):  # type: ignore[var-annotated]
        with pytest.raises(
            errors.DispatchError,
            match=f"its parts returned Batch and {kind}, which cannot be joined",
        ):
            call(rows(4), instead)
    padded = rows(3).pad(4)
    with group.method(Member.same).keep(padded) as kept:
        assert kept.num_padding == group.method(Member.same)(padded).num_padding == 1
        assert kept.fetch().equals(padded) and kept.unpad().fetch().equals(rows(3))  # type: ignore[attr-defined]


# --- topology -------------------------------------------------------------------------------------


def test_topology_check_asks_once(make_cluster: Callable[..., Members]) -> None:
    group = make_cluster(WithItsOwnView, world_size=4, tp_size=2)

    def num_calls() -> list[int]:
        return [status.health.num_calls for status in group.health() if status.health]

    assert num_calls() == [0] * 4, "only the constructor has run"
    group.echo(1)
    assert group.method(WithItsOwnView.asked)() == [0, 0, 0, 0]  # type: ignore[arg-type]
    before = num_calls()
    group.add(rows(4))
    assert num_calls() == [count + 2 for count in before], "get_rank_info, and the step"
    group.add(rows(4))
    assert group.method(WithItsOwnView.asked)() == [1, 1, 1, 1]  # type: ignore[arg-type]


def test_topology_check_has_call_limit(
    make_cluster: Callable[..., Members], tmp_path: Path
) -> None:
    group = make_cluster(WithItsOwnView, world_size=2)
    release = tmp_path / "release"
    waiting = group.method(Member.wait_on).submit([1], str(release))
    wait_until(Path(f"{release}.1").exists, "rank 1 has begun")
    with pytest.raises(
        errors.HelmsmanError, match=r"get_rank_info did not finish within .*\(limit 0\.[0-9]+ s"
    ):
        group.method(Member.add).options(timeout=0.4)(rows(2))
    release.touch()
    assert waiting.result(LIMIT_S) == [0, 1]
    assert group.add(rows(2))["x"].tolist() == [0, 1]  # type: ignore[index]


def test_submit_beside_topology_check(make_cluster: Callable[..., Members], tmp_path: Path) -> None:
    group = make_cluster(WithItsOwnView, world_size=2)
    release = tmp_path / "release"
    waiting = group.method(Member.wait_on).submit([1], str(release))
    wait_until(Path(f"{release}.1").exists, "rank 1 has begun")
    numbers = [1, 2]
    summed = group.method(Member.summed).submit(numbers)
    numbers[:] = [100, 100]  # after the arguments were pickled
    added = group.method(Member.add).submit(rows(2))
    steps = group.method(Member.steps).submit()
    late = group.execute_all_async("steps", timeout=0.3)
    with pytest.raises(
        errors.CallTimeoutError,
        match="steps did not finish within .*not sent: an earlier call still waits",
    ):
        late.result(LIMIT_S)
    assert not (waiting.done() or summed.done() or added.done() or steps.done())
    release.touch()
    assert (summed.result(LIMIT_S), added.result(LIMIT_S)["x"].tolist()) == (3, [0, 1])  # type: ignore[index]
    assert steps.result(LIMIT_S) == [1, 1], "calls keep their order during the check"
    assert group.method(WithItsOwnView.asked)() == [1, 1]  # type: ignore[arg-type]


def test_topology_check_fails(make_cluster: Callable[..., Members]) -> None:
    group = make_cluster(WithItsOwnView, 2, world_size=4, tp_size=2, name="astray")
    added, steps = group.method(Member.add).submit(rows(4)), group.method(Member.steps).submit()
    with pytest.raises(
        errors.TopologyMismatchError, match="2 of the 4 ranks of cluster 'astray'"
    ) as caught:
        added.result(LIMIT_S)
    assert caught.value.differences == {
        "astray/2": ("tp_rank=0", "tp_rank=1"),
        "astray/3": ("tp_rank=1", "tp_rank=2"),
    }
    assert steps.result(LIMIT_S) == [0, 0, 0, 0]


# --- failures -------------------------------------------------------------------------------------


def test_timeout_names_rank(members: Members, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with pytest.raises(errors.HelmsmanError) as caught:
        members.method(Member.wait_on).options(timeout=0.7)([3], str(release))
    text = str(caught.value)
    assert "members/3" in text and "did not finish within" in text and "members/4" not in text
    running = [status.health.running if status.health else None for status in members.health()]
    assert [rank for rank, method in enumerate(running) if str(method).endswith("wait_on")] == [3]
    release.touch()
    wait_until(
        lambda: all(status.state is WorkerState.READY for status in members.health()),
        "the rank is usable",
    )


def test_restart_refuses_guest_worker(scheduler: Scheduler, role: str) -> None:
    from helmsman.api.scheduler import Job, SchedulingStrategy

    scheduler.create_workers(Job(role=role))
    guests = SchedulingStrategy(type="colocation", target=role)
    scheduler.create_workers(Job(role=f"{role}-guest", scheduling_strategy=guests))
    with pytest.raises(errors.InvalidSpecError, match=f"a worker of '{role}', to which it belongs"):
        scheduler.restart_worker(f"{role}-guest/0")
    with pytest.raises(errors.WorkerNotFoundError):
        scheduler.restart_worker(f"{role}/1")


def test_cluster_failed_start_frees_devices(
    resources: ResourceManager, scheduler: Scheduler
) -> None:
    config = ClusterConfig(device_mapping=[1, 3], num_cpus=0.5, env_vars=ON_CPU)
    with pytest.raises(errors.HelmsmanError, match="this one does not start"):
        Cluster("stillborn", Plain, resources, config, kwargs={"text": "refuse"})
    assert "stillborn" not in resources.allocations
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers("stillborn")


# --- how many calls -------------------------------------------------------------------------------


def test_max_concurrency(make_cluster: Callable[..., Members], tmp_path: Path) -> None:
    group = make_cluster(AsyncMember, world_size=2, max_concurrency=2)
    releases = [tmp_path / f"release-{number}" for number in range(3)]
    futures = [group.execute_all_async("hold", str(release)) for release in releases]
    wait_until(
        lambda: all(Path(f"{release}.began").exists() for release in releases[:2]),
        "two are in flight",
    )
    assert not Path(f"{releases[2]}.began").exists()
    releases[1].touch()
    wait_until(Path(f"{releases[2]}.began").exists, "the third follows")
    for release in releases:
        release.touch()
    assert [future.result(LIMIT_S) for future in futures] == [[True, True]] * 3


class AsyncMember:
    """A worker whose method runs concurrently."""

    async def hold(self, release: str) -> bool:
        """Create the file ``release.began``, then wait for ``release``."""
        Path(f"{release}.began").touch()
        while not os.path.exists(release):  # noqa: ASYNC110 - the test creates it
            await asyncio.sleep(0.005)
        return True


# --- devices --------------------------------------------------------------------------------------


def test_device_mappings_overlap(
    resources: ResourceManager, make_cluster: Callable[..., Members], members: Members
) -> None:
    train = make_cluster(device_mapping="4-7", name="train", num_gpus_per_worker=2)
    infer = make_cluster(device_mapping=[5, 4, 6], name="infer")
    assert train.colocated_with == ("members",) and infer.colocated_with == ("members", "train")
    devices = {
        rank: [device.index for device in found] for rank, found in train.rank_to_devices.items()
    }
    assert devices == {0: [4, 5], 1: [6, 7]}
    held = resources.holders(5)
    assert [(each.holder, each.rank) for each in held] == [
        ("members", 5),
        ("train", 0),
        ("infer", 0),
    ]
    assert [each.since for each in held] == sorted(each.since for each in held)
    line = next(line for line in resources.table().splitlines() if line.startswith("5 "))
    assert "members/5 since " in line and "train/0 since " in line and "infer/0 since " in line
    train.close()
    assert [each.holder for each in resources.holders(5)] == ["members", "infer"]
    with pytest.raises(IndexError, match="device is 8; this ResourceManager holds 8 devices"):
        resources.holders(8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"device_mapping": "0-8"},
            r"devices that this ResourceManager holds, which are 0 to 7 \(1 nodes x 8\)",
        ),
        ({"device_mapping": "3-1"}, "ascending ranges; '3-1' descends"),
        ({"device_mapping": "0-2", "num_gpus_per_worker": 0}, "a divisor of the 3 devices"),
        (
            {"device_mapping": "0-2", "world_size": 2},
            r"3 \(3 devices, 1 for each worker\), or None",
        ),
        ({"world_size": 0}, "'world_size'|world_size is 0|1 or more"),
        ({"world_size": 4, "mesh": ("dp", "tp")}, "expected each of"),
        ({"world_size": 2, "max_concurrency": 0}, "max_concurrency is 0; expected 1 or more"),
    ],
)
def test_cluster_config_refuses(
    make_cluster: Callable[..., Members],
    resources: ResourceManager,
    config: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(errors.InvalidSpecError, match=message):
        make_cluster(name="nonsense", **config)
    assert "nonsense" not in resources.allocations


def test_cluster_name(make_cluster: Callable[..., Members], resources: ResourceManager) -> None:
    """A name is unique among open groups; a second close does not affect its next owner."""
    first = make_cluster(name="once", world_size=1)
    with pytest.raises(errors.RoleExistsError, match="'once'"):
        make_cluster(name="once", world_size=1)
    first.close()
    make_cluster(name="once", world_size=1)
    first.close()
    assert "once" in resources.allocations


def test_cluster_role_deleted(make_cluster: Callable[..., Members], scheduler: Scheduler) -> None:
    group = make_cluster(world_size=2)
    scheduler.delete_workers(group.name)
    assert [status.state for status in group.health()] == [WorkerState.STOPPED] * 2
    with pytest.raises(errors.HelmsmanError, match=f"no worker '{group.name}/0'"):
        group.echo(1)
