"""Test the threads and the groups of devices that a recipe chooses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman.recipes import GRPOSettings
from helmsman.recipes.config import resolve
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.settings import Data, Machines, Reward, Rollout, Train
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


@pytest.mark.parametrize(
    ("cluster", "judge", "train", "found"),
    [
        ({"devices_per_node": 8}, 1, {}, (3, 4)),
        ({"devices_per_node": 8}, 1, {"tensor_parallel_size": 2}, (2, 5)),
        ({"devices_per_node": 8, "placement": "colocated", "rollout_devices": 2}, 1, {}, (6, 3)),
        (
            {"devices_per_node": 8, "placement": "colocated", "rollout_devices": 2},
            1,
            {"tensor_parallel_size": 2, "context_parallel_size": 2},
            (4, 2),
        ),
        ({"devices_per_node": 8, "rollout_devices": 6}, 0, {}, (2, 1)),
        ({"devices_per_node": 8, "rollout_devices": 4}, 2, {}, (2, 1)),
        ({"devices_per_node": 8, "rollout_instances": 5}, 1, {}, (2, 5)),
        (
            {"devices_per_node": 8, "rollout_instances": 3, "placement": "colocated"},
            4,
            {},
            (3, 3),
        ),
        ({"devices_per_node": 6}, 0, {"tensor_parallel_size": 4}, (4, 2)),
        # those that fit in turns alone are colocated
        ({"devices_per_node": 8, "rollout_devices": 8}, 0, {}, (8, 1)),
        ({"devices_per_node": 2}, 0, {"tensor_parallel_size": 2}, (2, 2)),
        ({"devices_per_node": 8, "rollout_devices": 4}, 1, {"tensor_parallel_size": 4}, (4, 1)),
    ],
)
def test_choose_groups_that_the_layouts_can_use(
    cluster: dict[str, Any], judge: int, train: dict[str, int], found: tuple[int, int]
) -> None:
    settings = run_of(cluster, judge, train)
    assert (settings.cluster.train_workers, settings.cluster.rollout_instances) == found
    resolve(settings)


@pytest.mark.parametrize(
    ("cluster", "judge", "train", "message"),
    [
        ({"devices_per_node": 8}, 8, {}, r"is 8, .* beside 2 of"),
        ({"devices_per_node": 2}, 1, {"tensor_parallel_size": 2}, r"is 1, .* beside 2 of"),
        (
            {"devices_per_node": 8, "placement": "colocated", "rollout_instances": 8},
            1,
            {},
            r"is 1, .* beside 8 of",
        ),
    ],
)
def test_judges_that_leave_too_few_devices(
    cluster: dict[str, Any], judge: int, train: dict[str, int], message: str
) -> None:
    """The message is about the judges, and not about numbers that were chosen."""
    with pytest.raises(ValueError, match=rf"^rewards\[1\]\.instances x devices {message}"):
        resolve(run_of(cluster, judge, train))


def run_of(cluster: dict[str, Any], judge: int, train: dict[str, int]) -> GRPOSettings:
    """Return settings with the choices for a judge of one device for each instance."""
    judges = (Reward(judge="j", instances=judge),) if judge else ()
    settings = msgspec.structs.replace(
        minimal(**cluster),
        train=Train(engine=train),
        rollout=Rollout(engine="vllm"),
        rewards=(Reward(use="exact"), *judges),
    )
    given = frozenset({"cluster.device_memory_gb", *(f"cluster.{name}" for name in cluster)})
    return choose(settings, given | {"rollout.engine"})[0]
