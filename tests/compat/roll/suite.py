"""Tests of clusters in ROLL's style; a module has them for its fixture ``scheduler``."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from helmsman import Scheduler
from helmsman.api import errors
from helmsman.api.batch import Batch
from helmsman.compat import roll
from helmsman.compat.roll import Cluster, ResourceManager, get, register
from helmsman.compat.roll_data import DataProto
from helmsman.worker_groups import ClusterConfig
from tests.compat.roll.workers import Coroutines, Counter, Parallel, Rows


@dataclass
class WorkerConfig:
    """The fields of ROLL's that matter here."""

    name: str = "worker"
    world_size: int | None = None
    device_mapping: list[int] | str | None = None
    num_gpus_per_worker: int = 1
    strategy_args: Any = None
    system_envs: dict[str, str] = field(default_factory=lambda: {"HELMSMAN_PLATFORM": "cpu"})


class Tagged(roll.Worker):
    @register(
        dispatch_mode={
            "dispatch_fn": roll.dispatch_one_to_all,
            "collect_fn": roll.collect_all_to_one,
        }
    )
    def tag(self, text: str) -> str:
        return f"{text}{self.rank}"


class ClusterSuite:
    @pytest.fixture
    def start(self, scheduler: Scheduler) -> Iterator[Callable[..., Cluster]]:
        made: list[Cluster] = []
        with ResourceManager(8, 1, scheduler=scheduler) as resource_manager:

            def start(worker_cls: Any, **config: Any) -> Cluster:
                made.append(
                    Cluster(
                        name=f"worker{len(made)}",
                        worker_cls=worker_cls,
                        resource_manager=resource_manager,
                        worker_config=WorkerConfig(**config),
                    )
                )
                return made[-1]

            yield start
            for cluster in made:
                cluster.close()

    def test_cluster_run(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Counter, world_size=2)
        assert cluster.add(x=1) == [1, 2]
        assert get(cluster.add(1, blocking=False)) == [2, 3]
        assert cluster.first(7) == (0, 7)
        assert cluster.first(7, blocking=False).result(60) == (0, 7)
        assert cluster.own([10, 20], y=["a", "b"]) == [(0, 10, "a"), (1, 20, "b")]
        assert cluster.custom(5) == 11
        with pytest.raises(errors.DispatchError, match="own.* 2 ranks|own.*3 values|own"):
            cluster.own([1, 2, 3])

    def test_cluster_execute_by_name(self, start: Callable[..., Cluster]) -> None:
        cluster = start("tests.compat.roll.workers.Counter", world_size=2)
        assert cluster.execute_all_sync("add", 0) == [0, 1]
        assert cluster.execute_all_sync("add", [1, 10]) == [1, 11], "each rank gets its entry"
        assert get(cluster.execute_all_async("add", x=1)) == [2, 12]
        assert cluster.execute_rank_zero_sync("add", 1) == 3
        assert cluster.execute_rank_zero("add", x=0).result(60) == 3
        assert get(cluster.workers[1].add.remote(1)) == 13
        (name, role, size, port), other = cluster.execute_all_sync("names")
        assert (name, role, size) == ("worker0-0", "worker0", 2) and 0 < port < 1 << 16
        assert other[0] == "worker0-1"

    def test_cluster_dp_mp_compute(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Parallel, world_size=8)
        assert (cluster.dp_size, cluster.tp_size, cluster.pp_size, cluster.cp_size) == (2, 2, 2, 1)
        assert cluster.get_rank_info(5).pp_rank == 1
        assert cluster.add(x=[1, 2, 3, 4, 5, 6, 7, 8]) == [
            [row > 4, 0, 1, row] for row in range(1, 9)
        ], "rows of tp 0 and the last stage, in dp order"
        joined = cluster.same(Batch({"x": [1, 2, 3, 4]}))
        assert joined["x"] == [1, 2, 3, 4]
        rows = cluster.same(Rows([1, 2, 3, 4], {"step": 1}))
        assert (rows.batch, rows.meta_info) == ([1, 2, 3, 4], {"step": 1})
        data = DataProto.from_single_dict({"x": torch.arange(4), "y": [*"abcd"]}, {"step": 1})
        returned = cluster.same(data)
        assert (returned["x"].tolist(), returned["y"].tolist()) == ([0, 1, 2, 3], [*"abcd"])
        assert returned.meta_info == {"step": 1}
        with pytest.raises(ValueError, match="3 rows do not divide over 2 dp ranks"):
            cluster.add([1, 2, 3])
        with pytest.raises(ValueError, match="a list, or an object with chunk and concat; got int"):
            cluster.number([1, 2])

    def test_cluster_dispatch_first_brings_metadata(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Parallel, world_size=8)
        given = cluster.given(Rows([1, 2, 3, 4], {"step": 1}))
        rows = [batch for batch, _ in given]
        assert rows == [[1, 2], None, [3, 4], None, None, None, None, None]
        assert [meta for _, meta in given] == [{"step": 1}] * 8
        given = cluster.given(Batch({"x": [1, 2, 3, 4]}, {"step": 1}))
        assert [batch for batch, _ in given] == rows
        assert [meta for _, meta in given] == [{"step": 1}] * 8

    def test_cluster_coroutines(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Coroutines, world_size=2)

        async def gather() -> list[Any]:
            return [
                await asyncio.gather(*cluster.one_to_all(blocking=False)),
                await asyncio.gather(*cluster.all_to_all(blocking=False)),
                *[
                    await asyncio.gather(*[each.obj_ref for each in method(blocking=False)])
                    for method in (
                        cluster.one_to_all_one,
                        cluster.dp_mp_compute,
                        cluster.dp_mp_dispatch_first,
                    )
                ],
            ]

        assert asyncio.run(gather()) == [[1, 1]] * 5
        assert cluster.one_to_all_one() == 1
        assert [each.collected for each in cluster.one_to_all_one(blocking=False)] == [True, False]
        assert get(cluster.one_to_all_one(blocking=False)) == [1]

    def test_cluster_on_devices(self, start: Callable[..., Cluster]) -> None:
        strategy = SimpleNamespace(strategy_config={"virtual_pipeline_model_parallel_size": 3})
        cluster = start(
            Counter,
            device_mapping="list(range(0,8))",
            num_gpus_per_worker=2,
            strategy_args=strategy,
        )
        assert (cluster.world_size, cluster.vp_size) == (4, 3)
        assert cluster.rank2devices[1] == [
            {"rank": 0, "node_rank": 0, "gpu_rank": 2},
            {"rank": 1, "node_rank": 0, "gpu_rank": 3},
        ]
        other = start(Counter, device_mapping=[6, 7])
        assert other.colocated_with == ("worker0",)
        assert other.resource_manager is not None
        assert [held.holder for held in other.resource_manager.holders(7)] == ["worker0", "worker1"]

    def test_cluster_coordinates_after_initialize(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Counter, world_size=2)
        assert (cluster.dp_size, cluster.tp_size) == (2, 1)
        cluster.initialize(SimpleNamespace(seed=1))
        assert (cluster.dp_size, cluster.tp_size) == (1, 2)

    def test_cluster_pickled_calls_the_same_workers(self, start: Callable[..., Cluster]) -> None:
        cluster: Any = start(Counter, world_size=2)
        cluster.add(10)
        other = pickle.loads(cloudpickle.dumps(cluster))
        assert other.add(1) == [11, 12]
        assert get(other.add(1, blocking=False)) == [12, 13]
        assert other.execute_all_sync("add", [0, 1]) == [12, 14]
        assert get(other.workers[0].add.remote(1)) == 13
        assert cluster.add(0) == [13, 14]
        other.helmsman.close()

    def test_cluster_takes_ray_class(
        self, start: Callable[..., Cluster], scheduler: Scheduler
    ) -> None:
        ray = pytest.importorskip("ray", reason="the class is one of Ray's")
        assert start(ray.remote(Counter), world_size=1).execute_all_sync("add", 4) == [4]

    def test_cluster_takes_cluster_config(self, scheduler: Scheduler) -> None:
        with ResourceManager(0, 1, scheduler=scheduler) as resource_manager:
            cluster = Cluster("plain", Counter, resource_manager, ClusterConfig(world_size=1))
            assert cluster.execute_all_sync("add", 4) == [4]
            cluster.close()

    def test_cluster_mode_of_named_functions(self, start: Callable[..., Cluster]) -> None:
        assert start(Tagged, world_size=2).tag("rank ") == "rank 0"
