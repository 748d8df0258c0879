"""Worker groups in processes of their own: ranks, devices, values, handles and restarts."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmsman.api import errors
from helmsman.api.remote_batch import RemoteBatch
from helmsman.api.scheduler import ResultHandle, Scheduler
from helmsman.api.worker_group import ClusterConfig, GroupWorker
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.group_workers import Member
from tests.contract.groups import ON_CPU, Members
from tests.contract.helpers import LIMIT_S, wait_until
from tests.contract.marks import needs_processes, only_ray, ray_smoke
from tests.controller.engines import CountingRollout


@ray_smoke
def test_cluster_ranks_and_devices(members: Members, resources: ResourceManager) -> None:
    sizes = (members.dp_size, members.tp_size, members.pp_size, members.cp_size)
    assert (members.world_size, *sizes) == (8, 2, 2, 2, 1)
    assert members.coordinates() == [str(members.get_rank_info(rank)) for rank in range(8)]
    assert members.method(Member.rank_at_start)() == list(range(8)), (
        "ranks are set before constructors"
    )
    ids = [f"members/{rank}" for rank in range(8)]
    assert [worker.id for worker in members.workers] == ids
    assert {
        rank: [device.index for device in devices]
        for rank, devices in members.rank_to_devices.items()
    } == {rank: [rank] for rank in range(8)}
    assert set(members.rank_to_node.values()) == {0}
    assert members.master_address == members.workers[0].ip
    assert members.master_port == int(members.workers[0].engine_ports[0])
    assert [status.worker_id for status in members.health()] == ids
    assert "members/5" in members.table() and "dp=0/2 tp=1/2 pp=1/2 cp=0/1" in members.table()
    with pytest.raises(IndexError, match="rank is 8; expected 0 to 7"):
        members.get_rank_info(8)
    assert resources.holders(3)[0].holder == "members"


@ray_smoke
@needs_processes
def test_rendezvous_variables(members: Members) -> None:
    expected = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "8",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": members.master_address,
            "MASTER_PORT": str(members.master_port),
            "CUDA_VISIBLE_DEVICES": members.rank_to_devices[rank][0].device_id,
            "CLUSTER_NAME": "members",
            "WORKER_NAME": f"members-{rank}",
        }
        for rank in range(8)
    ]
    assert members.method(Member.environment)(list(expected[0])) == expected


@needs_processes
def test_resource_manager_holds_devices(scheduler: Scheduler, resources: ResourceManager) -> None:
    assert len(resources.devices) == 8
    with pytest.raises(errors.PlacementTimeoutError, match="devices"):
        ResourceManager(8, scheduler=scheduler, name="second")
    assert scheduler.nodes()[0].num_free_devices == 0


# --- values ---------------------------------------------------------------------------------------


def test_arguments_are_rank_local(members: Members, make_cluster: Callable[..., Members]) -> None:
    value = np.zeros(1 << 16)
    results = members.echo(value)
    results[0][:] = 1
    assert not any(result.any() for result in results[1:]) and not value.any()
    group = make_cluster(world_size=4, tp_size=2)
    # Inside the message, beside it, and put once for the ranks of a dp coordinate.
    for size in (8, 1 << 10, 1 << 16):
        value = np.zeros(size)
        assert group.method(Member.in_place)(value).tolist() == [1.0] * size  # type: ignore[arg-type]
        assert not value.any()


def test_keep_passed_to_other_group(members: Members, make_cluster: Callable[..., Members]) -> None:
    kept = members.make.keep(6)
    assert isinstance(kept, RemoteBatch)
    assert len(kept) == 12 and "members/4" in repr(kept) and "members/6" in repr(kept)
    other = make_cluster(world_size=3)
    assert other.rows_of(kept) == [(value // 4, value) for value in range(12)]
    assert other.rows_of(kept[1:10]) == [(value // 3, value + 1) for value in range(9)]
    assert other.method(Member.padded_add)(kept[:7]).tolist() == list(range(1, 8))  # type: ignore[arg-type]
    nested = other.echo([kept[4:8], 7])
    assert [batch["x"].tolist() for batch, _ in nested] == [[4, 5, 6, 7]] * 3
    again = other.method(Member.add).keep(kept[:3])
    assert isinstance(again, RemoteBatch) and again["x"].tolist() == [0, 1, 2]
    assert kept["x"].tolist() == list(range(12))
    kept.release()
    with pytest.raises((errors.HandleLostError, errors.GroupCallError), match="it was released"):
        other.rows_of(kept)


def test_keep_returns_handles(members: Members, scheduler: Scheduler) -> None:
    kept = members.echo.keep({"a": 1})
    assert [type(each) for each in kept] == [ResultHandle] * 8
    assert scheduler.get(kept[3]) == {"a": 1}  # type: ignore[arg-type]
    assert members.echo(kept[5]) == [{"a": 1}] * 8
    for handle in kept:
        scheduler.release(handle)  # type: ignore[arg-type]
    with (
        members.make.keep(2) as rows_kept,
        pytest.raises(TypeError, match=r"Call fetch\(\) first"),
    ):
        pickle.loads(pickle.dumps(rows_kept))


@ray_smoke
def test_put_and_pass_to_ranks(scheduler: Scheduler, members: Members) -> None:
    value = {"x": np.arange(1 << 16)}
    handle = scheduler.put(value)
    assert all(np.array_equal(each["x"], value["x"]) for each in members.echo(handle))
    assert np.array_equal(scheduler.get(handle)["x"], value["x"])
    scheduler.release(handle)
    scheduler.release(handle)
    for use in (lambda: scheduler.get(handle), lambda: members.echo(handle)):
        with pytest.raises(
            (errors.HandleLostError, errors.GroupCallError), match="it was released"
        ):
            use()


# --- handles --------------------------------------------------------------------------------------


@ray_smoke
@only_ray
def test_handle_in_ray_actor(make_cluster: Callable[..., Members]) -> None:
    import ray

    class Caller:
        """An actor of the user, which has been given a Cluster."""

        def __init__(self, cluster: Any) -> None:
            self._cluster = cluster

        async def run(self) -> Any:
            return await self._cluster.execute_all_async("echo", 7)

    cluster = make_cluster(device_mapping="0-3", tp_size=2)
    remote_class: Any = ray.remote(num_cpus=0)(Caller)
    actor = remote_class.remote(cluster)
    assert ray.get(actor.run.remote(), timeout=LIMIT_S) == [7] * 4
    ray.kill(actor)


class Storage:
    """Values that all workers of a run share."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put_if_absent(self, key: str, value: Any) -> bool:
        return self._values.setdefault(key, value) is value

    def get(self, key: str) -> Any:
        return self._values.get(key)


class StorageUser(GroupWorker):
    """A worker whose constructor is given a Cluster."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def first(self) -> tuple[bool, int]:
        rank = self.rank_info.rank
        was_first = self._storage.execute_rank_zero_sync("put_if_absent", "rank", [rank])
        return was_first, self._storage.execute_rank_zero_sync("get", "rank")[0]


def test_handle_in_worker(resources: ResourceManager, role: str) -> None:
    config = ClusterConfig(world_size=1, num_cpus=0.5, env_vars=ON_CPU)
    users = ClusterConfig(world_size=3, num_cpus=0.5, env_vars=ON_CPU)
    with (
        Cluster(f"{role}-storage", Storage, resources, config) as storage,  # type: ignore[var-annotated]
        Cluster(role, StorageUser, resources, users, kwargs={"storage": storage}) as group,  # type: ignore[var-annotated]
    ):
        found = group.execute_all_sync("first")
        assert sum(was_first for was_first, _ in found) == 1
        (winner,) = [rank for rank, (was_first, _) in enumerate(found) if was_first]
        assert [seen for _, seen in found] == [winner] * 3


# --- failures and restarts ------------------------------------------------------------------------


@ray_smoke
def test_failure_of_many_ranks(members: Members) -> None:
    with pytest.raises(errors.GroupCallError) as caught:
        members.fail_on([2, 5, 6], "no room")
    assert caught.value.first.worker_id in ("members/2", "members/5", "members/6")  # type: ignore[attr-defined]
    assert "failed on 3 of 8 ranks (2 other rank(s) failed as well" in str(
        caught.value
    ) and "no room" in str(caught.value)
    assert members.echo(1) == [1] * 8


@needs_processes
def test_restart_dead_rank(make_cluster: Callable[..., Members], tmp_path: Path) -> None:
    group = make_cluster(device_mapping="0-3", tp_size=2)
    pids = group.method(Member.pid)()
    with pytest.raises(errors.HelmsmanError, match="SIGKILL") as caught:
        group.method(Member.die_on).options(timeout=LIMIT_S)(2, str(tmp_path / "release"))
    assert f"{group.name}/2" in str(caught.value)
    (tmp_path / "release").touch()
    with pytest.raises(errors.HelmsmanError, match="SIGKILL"):
        group.echo(1)
    group.restart(2)
    assert group.echo(1) == [1] * 4
    now = group.method(Member.pid)()
    assert [now[rank] == pids[rank] for rank in range(4)] == [True, True, False, True]
    assert group.coordinates()[2] == str(group.get_rank_info(2))
    shown = group.method(Member.environment)(["RANK", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"])
    assert shown[2] == {
        "RANK": "2",
        "CUDA_VISIBLE_DEVICES": group.rank_to_devices[2][0].device_id,
        "MASTER_PORT": str(group.master_port),
    }


@needs_processes
def test_restart_concurrently(make_cluster: Callable[..., Members]) -> None:
    group = make_cluster(world_size=3)
    first = group.method(Member.pid)()
    with ThreadPoolExecutor() as pool:
        list(pool.map(group.restart, [1, 1, 0]))
        list(pool.map(group.scheduler.restart_worker, [f"{group.name}/2"] * 2))
    group.restart(2)
    second = group.method(Member.pid)()
    assert not set(first) & set(second)
    for pid in second[:2]:
        os.kill(pid, signal.SIGKILL)
    # The second death may be reported after the error is raised.
    with pytest.raises(errors.HelmsmanError, match=r"failed on [12] of 3 ranks(.|\n)*SIGKILL"):
        group.echo(1)
    for rank in (0, 1):
        group.restart(rank)
    assert group.method(Member.rank_at_start)() == [0, 1, 2]
    assert {each["MASTER_PORT"] for each in group.method(Member.environment)(["MASTER_PORT"])} == {
        str(group.master_port)
    }


class RefusesWhileBroken:
    """Its constructor fails while a file exists."""

    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            raise RuntimeError(f"broken by {path}")

    def fine(self) -> bool:
        return True


@needs_processes
def test_restart_again_after_failure(make_cluster: Callable[..., Members], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    group = make_cluster(RefusesWhileBroken, str(broken), world_size=2)
    broken.touch()
    with pytest.raises(errors.EngineCreationError, match="broken"):
        group.restart(1)
    broken.unlink()
    group.restart(1)
    assert group.execute_all_sync("fine") == [True, True]


class Generator(CountingRollout):
    """A rollout engine whose readiness a test can read."""

    def is_ready(self) -> bool:
        return self.ready


@needs_processes
def test_restart_of_supervised_worker(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(Generator, device_mapping="0-7", num_gpus_per_worker=2)
    policy = SupervisionPolicy(probe_every_s=0.1, suspect_s=5.0, dead_s=20.0, restart_pause_s=0.05)
    with RolloutController(
        cluster.scheduler, Generator, cluster, supervision=policy, retries=RetryGeneration()
    ) as rollout:
        rollout.update_weights({"weight": [1.0]}, 2)
        dead, id_ = cluster.health()[1].pid, rollout.workers[1].id
        os.kill(dead, signal.SIGKILL)
        assert len(rollout.generate([[1]] * 20)) == 20
        wait_until(
            lambda: (
                rollout.stats().instances[id_].state is Health.HEALTHY
                and cluster.health()[1].pid not in (None, dead)
            ),
            "the instance serves again",
        )
        assert cluster.execute_on([1], "is_ready") == [True]
        assert rollout.versions()[id_] == 2
