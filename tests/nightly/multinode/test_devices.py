"""Tests of the devices that a worker sees, by the raylet's mask, settings of Ray and kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.multinode.conftest import Nodes
from tests.multinode.siblings import MASKS, module_run, run

__all__ = ["module_run", "run"]
pytestmark = pytest.mark.usefixtures("left_as_found")

NOSET = {kind: f"RAY_EXPERIMENTAL_NOSET_{variable}" for kind, variable in MASKS.items()}
ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_NUMBERS, _NAMES = "4,5,6,7", "X-d,X-c,X-b,X-a"
NODES = [
    ("GPU", None, False, "0"),
    ("GPU", _NUMBERS, False, "1"),
    ("GPU", _NUMBERS, True, "0"),
    ("GPU", _NAMES, False, "0"),
    ("GPU", _NAMES, True, "0"),
    ("NPU", None, False, "0"),
    ("NPU", _NUMBERS, False, "1"),
    ("NPU", _NAMES, True, "0"),
]
"""Each mask with each of the other settings. NPUs differ only by the names of variables."""


def _name(kind: str, mask: str | None, noset: bool, on_zero: str) -> str:
    return f"{kind}-{(mask or 'unmasked')[:1]}-{'noset' if noset else 'set'}-{on_zero}"


def _node(kind: str, mask: str | None, noset: bool, on_zero: str) -> dict[str, Any]:
    env_vars = {
        ON_ZERO: on_zero,
        **({MASKS[kind]: mask} if mask else {}),
        **({NOSET[kind]: "1"} if noset else {}),
    }
    sizes = {"num_gpus": 4} if kind == "GPU" else {"resources": {"NPU": 4}, "num_gpus": 0}
    return {
        "num_cpus": 8,
        "env_vars": env_vars,
        "labels": {"cell": _name(kind, mask, noset, on_zero)},
        **sizes,
    }


@pytest.fixture(scope="module")
def nodes(fleet: Nodes) -> Iterator[Nodes]:
    """A node for each combination of settings."""
    with fleet.added(*[_node(*each) for each in NODES]):
        yield fleet


def _seen(run: RayScheduler, worker_id: str) -> dict[str, str]:
    return dict(Engine.create(run, worker_id, Counter).call("environ", *MASKS.values()))


@pytest.mark.parametrize(
    ("kind", "mask", "noset", "on_zero"), NODES, ids=[_name(*each) for each in NODES]
)
def test_devices_visible_to_worker(
    run: RayScheduler,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mask: str | None,
    noset: bool,
    on_zero: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "31")  # set for the driver only
    cell = {"cell": _name(kind, mask, noset, on_zero)}
    spec = SchedulingSpec(cpu=1, gpu=2, node_labels=cell)
    run.create_workers(
        [
            Job(role="a", replicas=2, tasks=[spec]),
            Job(role="none", tasks=[SchedulingSpec(node_labels=cell)]),
        ]
    )
    run.fork_workers("sibling", "a")
    on_node = mask.split(",") if mask else ["0", "1", "2", "3"]
    other = next(variable for each, variable in MASKS.items() if each != kind)
    for index, ids in enumerate((on_node[:2], on_node[2:])):
        for role in ("a", "sibling"):
            assert run.get_workers(role)[index].devices == ids, (
                "physical ids in the order of the node"
            )
            assert _seen(run, f"{role}/{index}") == {MASKS[kind]: ",".join(ids), other: ""}
    assert _seen(run, "none/0") == dict.fromkeys(MASKS.values(), ""), (
        "a worker that requests no device sees none"
    )


class Uses:
    """An engine that uses its platform."""

    def __init__(self) -> None:
        from helmsman import current_platform

        self.name = current_platform.name

    def platform(self) -> str:
        """Return the name of the platform."""
        return self.name


@pytest.mark.parametrize("kind", list(MASKS))
def test_platform_cpu_despite_devices(run: RayScheduler, kind: str) -> None:
    """The devices are logical: torch counts none."""
    cell = {"cell": _name(kind, _NUMBERS, False, "1")}
    run.create_workers(Job(role="a", tasks=[SchedulingSpec(gpu=2, node_labels=cell)]))
    with pytest.raises(errors.EngineCreationError) as caught:
        Engine.create(run, "a/0", Uses)
    expected = (
        ["torch_npu"]
        if kind == "NPU"
        else ["DeviceMismatchError", "a/0", "cuda 4,5", f"{MASKS[kind]}='4,5'", "on the CPU"]
    )
    for fact in expected:
        assert fact in str(caught.value)
    run.create_workers(
        Job(
            role="b",
            tasks=[SchedulingSpec(gpu=2, node_labels=cell, env_vars={"HELMSMAN_PLATFORM": "cpu"})],
        )
    )
    assert Engine.create(run, "b/0", Uses).call("platform") == "cpu", "the user has chosen the CPU"
