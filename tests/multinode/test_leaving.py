"""Test that the requests of a drained node move, and its instances are rebuilt elsewhere."""

from __future__ import annotations

from helmsman.api.generation import SamplingParams
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.helpers import wait_until
from tests.multinode.conftest import Nodes, gpu_node
from tests.multinode.leaving import (
    ELASTIC,
    all_serve,
    drain,
    end_node,
    ids_on,
    settle,
    start_rollout,
)


def test_drained_node_requests_move(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=4, labels={"elastic": "yes"}))
    with start_rollout(run, 2, ELASTIC, engine_kwargs={"gated": True}) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 5) == 5
        (leaving,) = ids_on(rollout, doomed)
        (staying,) = {worker.id for worker in rollout.workers} - {leaving}
        futures = [
            rollout.submit([i + 1, i + 2, i + 3], SamplingParams(max_new_tokens=8))
            for i in range(6)
        ]
        wait_until(
            lambda: len(run.call_engine(leaving, "figures")[2]) == 3,
            "half of the requests have arrived",
        )
        spare = nodes.add(**gpu_node(num_gpus=4, labels={"elastic": "yes"}))
        settle(doomed)
        drain(nodes, doomed.node_id)
        wait_until(
            lambda: ids_on(rollout, spare) == [leaving] and all_serve(rollout),
            "the instance is on the spare node",
            60.0,
        )
        assert rollout.stats().instances[staying].num_in_flight == 6
        end_node(nodes, doomed)
        while not all(future.done() for future in futures):
            run.call_engine(staying, "finish")
        results = [future.result() for future in futures]
        assert sorted(len(result.token_ids) for result in results) == [3, 3, 3, 8, 8, 8], (
            "the moved requests keep their tokens"
        )
        assert {version for result in results for version in result.versions} == {5}
        assert rollout.versions() == {staying: 5, leaving: 5}
        assert run.scale("rollout", 1) == []
    end_node(nodes, spare)
