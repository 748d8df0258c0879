"""Test the threads and the groups of devices that a recipe chooses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman.recipes import GRPOSettings
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.settings import Data, Machines, Reward
from helmsman.recipes.sizes import choose, num_cores


def minimal(**cluster: Any) -> GRPOSettings:
    rewards = (Reward(use="exact"),)
    return GRPOSettings(
        model="m", data=Data(train="t"), rewards=rewards, cluster=Machines(**cluster)
    )


def test_choose_threads_of_alternating_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found, choices = choose(minimal(), frozenset({"cluster.devices_per_node"}))
    cores = str(num_cores())
    assert [job.tasks[0].env_vars["OMP_NUM_THREADS"] for job in make_jobs(found)] == [cores, cores]
    assert sum(job.tasks[0].cpu for job in make_jobs(found)) == num_cores(), (
        "the roles fit beside each other"
    )
    assert f"the roles alternate on {cores} cores" in {choice.reason for choice in choices}

    ahead = msgspec.structs.replace(
        minimal(), rollout=msgspec.structs.replace(minimal().rollout, staleness=1.0)
    )
    found, _ = choose(ahead, frozenset({"cluster.devices_per_node"}))
    assert found.cluster.train_threads == 0, "roles that work at once share the cores"
    found, _ = choose(minimal(), frozenset({"cluster.devices_per_node", "cluster.train_cpus"}))
    assert (found.cluster.train_threads, found.cluster.rollout_threads) == (0, num_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, _ = choose(minimal(), frozenset({"cluster.devices_per_node"}))
    assert found.cluster.train_threads == 1


def test_choose_groups_of_devices() -> None:
    given = frozenset({"cluster.devices_per_node", "cluster.device_memory_gb"})
    found, _ = choose(minimal(devices_per_node=8), given)
    assert (found.cluster.train_workers, found.cluster.rollout_instances) == (4, 4)
    found, _ = choose(minimal(devices_per_node=1), given)
    assert (found.cluster.placement, found.cluster.train_workers) == ("colocated", 1)
    found, _ = choose(
        minimal(devices_per_node=8, num_nodes=4, rollout_devices=2),
        given | {"cluster.rollout_devices"},
    )
    assert found.cluster.scheduler == "ray"
    assert (found.cluster.train_workers, found.cluster.rollout_instances) == (16, 8)
