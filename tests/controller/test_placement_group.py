"""What a job asks Ray for, and whether a cluster could ever give it: pure functions, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="placement groups are Ray's")

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller.placement_group import accelerator_resource, bundle_of, plan_groups, require_feasible


def _node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": name, "Resources": resources, "NodeID": name}


def test_one_group_for_all_or_one_for_each() -> None:
    spec = SchedulingSpec(cpu=2, gpu=1, mem=4)
    (shared,) = plan_groups(Job(role="r", replicas=3, tasks=[spec]), "GPU", 8, "run")
    assert (shared.name, shared.strategy, shared.replicas) == ("run/r", "PACK", [0, 1, 2])
    assert shared.bundles == [{"CPU": 2, "GPU": 1, "memory": 4e9}] * 3
    separate = SchedulingSpec(gpu=1, ray_placement_strategy="separate")
    groups = plan_groups(Job(role="r", replicas=2, tasks=[separate]), "NPU", 8, "run")
    assert [(group.name, group.strategy, group.replicas) for group in groups] == [
        ("run/r/0", "STRICT_PACK", [0]),
        ("run/r/1", "STRICT_PACK", [1]),
    ]
    assert groups[0].bundles == [{"CPU": 1, "NPU": 1}]


@pytest.mark.parametrize(("gpu", "parts"), [(8, [8]), (16, [8, 8]), (20, [8, 8, 4]), (4, [4])])
def test_a_deferred_instance_is_split_over_nodes(gpu: int, parts: list[int]) -> None:
    spec = SchedulingSpec(gpu=gpu, ray_placement_strategy="deferred")
    (group,) = plan_groups(Job(role="r", tasks=[spec]), "GPU", 8, "run")
    assert [bundle["GPU"] for bundle in group.bundles] == parts


def test_a_bundle_is_never_empty() -> None:
    assert bundle_of(SchedulingSpec(cpu=0), "GPU") == {"CPU": 0.001}
    assert bundle_of(SchedulingSpec(accelerator_type="H100"), "GPU") == {"CPU": 1, "accelerator_type:H100": 0.001}


def test_the_kind_of_accelerator_is_the_clusters() -> None:
    assert accelerator_resource([_node("a", CPU=1), _node("b", NPU=8)]) == "NPU"
    assert accelerator_resource([_node("a", CPU=1, GPU=8)]) == "GPU"
    assert accelerator_resource([_node("a", CPU=1)]) == "GPU"


def test_what_does_not_fit_names_the_shortfall() -> None:
    nodes = [_node("small", CPU=4, GPU=1, memory=8e9), _node("large", CPU=64, GPU=4, memory=64e9)]

    def refuse(**spec: Any) -> str:
        job = Job(role="r", replicas=spec.pop("replicas", 1), tasks=[SchedulingSpec(**spec)])
        with pytest.raises(errors.PlacementInfeasibleError) as caught:
            require_feasible(job, plan_groups(job, "GPU", 4, "run"), nodes)
        return str(caught.value)

    message = refuse(gpu=6)
    assert "observed at most 1 CPU" not in message
    assert "short of 2 GPU" in message
    assert "large" in message
    assert "Change SchedulingSpec.gpu, or add nodes" in message
    assert "short of 36 CPU" in refuse(cpu=100)
    assert "short of 36 GB memory" in refuse(mem=100)
    assert "Job.replicas or SchedulingSpec.gpu" in refuse(gpu=1, replicas=6)
    assert "6 GPU for 6 workers together" in refuse(gpu=1, replicas=6, cpu=0)
    job = Job(role="r", replicas=5, tasks=[SchedulingSpec(gpu=1)])
    require_feasible(job, plan_groups(job, "GPU", 4, "run"), nodes)
