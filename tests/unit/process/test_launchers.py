"""Tests of the rank, count and head of a node from the recorded variables of launchers."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman._process.launchers import ALONE, find_many_nodes, first_host, identify_node
from helmsman.api.errors import LauncherError

BEAKER = {
    "BEAKER_REPLICA_RANK": "2",
    "BEAKER_REPLICA_COUNT": "4",
    "BEAKER_LEADER_REPLICA_HOSTNAME": "jupiter-cs-aus-133.reviz.ai2.in",
}
PAI = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
PET = {
    "PET_NODE_RANK": "0",
    "PET_NNODES": "2",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_NPROC_PER_NODE": "8",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "gpu[007,012-013]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "1",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.2.0.1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "count", "head"),
    [
        (BEAKER, "Beaker", 2, 4, "jupiter-cs-aus-133.reviz.ai2.in"),
        (PAI, "RANK and WORLD_SIZE (PAI-DLC)", 1, 2, "dlc-master-0"),
        (TORCHRUN, "torchrun", 1, 3, "10.0.0.7"),
        (PET, "torchrun's PET variables", 0, 2, "job-master-0"),
        (SLURM, "Slurm", 1, 3, "gpu007"),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[012-013]"},
            "Slurm",
            1,
            2,
            "gpu012",
        ),
        (SKYPILOT, "SkyPilot", 1, 2, "10.1.0.4"),
        (VOLCANO, "Volcano", 1, 2, "job-worker-0.job"),
        (DSTACK, "dstack", 1, 2, "10.2.0.1"),
        ({}, ALONE, 0, 1, ""),
        ({"SLURM_JOB_ID": "77", "SLURM_SUBMIT_HOST": "login"}, ALONE, 0, 1, ""),
        (
            TORCHRUN | {"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "3"},
            "torchrun in Slurm",
            1,
            3,
            "10.0.0.7",
        ),
    ],
)
def test_identify_node(
    environ: dict[str, str], launcher: str, rank: int, count: int, head: str
) -> None:
    found = identify_node(environ)
    assert (found.launcher, found.rank, found.count, found.head) == (launcher, rank, count, head)
    assert not found.attach_to


def test_identify_node_needs_flags() -> None:
    with pytest.raises(
        LauncherError,
        match=r"JOB_COMPLETION_INDEX=2; missing is the number of nodes \(--num-nodes\)",
    ):
        identify_node(KUBERNETES)
    with pytest.raises(LauncherError, match=r"the head's address \(--head\)"):
        identify_node(KUBERNETES, count=4)
    found = identify_node(KUBERNETES, count=4, head="train-0.train")
    assert (found.rank, found.count, found.head) == (2, 4, "train-0.train")
    assert found.said_by["rank"] == "JOB_COMPLETION_INDEX=2"
    assert identify_node(OPEN_MPI, head="10.0.0.1").rank == 1
    assert identify_node({"JOB_COMPLETION_INDEX": "0"}, count=4).head == "", (
        "the head does not need its own address"
    )


def test_identify_node_with_several_tasks_of_volcano() -> None:
    environ = VOLCANO | {"VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "job-master-0.job"}
    with pytest.raises(LauncherError, match="--num-nodes"):
        identify_node(environ)
    assert identify_node(environ, rank=2, count=3, head="job-master-0.job").rank == 2


def test_identify_node_by_flags_then_by_ray_address() -> None:
    found = identify_node(BEAKER | {"RAY_ADDRESS": "10.9.9.9:6379"}, rank=0, count=1)
    assert (found.rank, found.count, found.attach_to) == (0, 1, "")
    assert found.said_by["rank"] == "--node-rank 0"
    assert identify_node({}, count=1).rank == 0
    assert identify_node(SLURM | {"RAY_ADDRESS": "10.9.9.9:6379"}).attach_to == "10.9.9.9:6379"


def test_identify_node_launchers_disagree() -> None:
    with pytest.raises(LauncherError) as caught:
        identify_node(TORCHRUN | SLURM | {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "10.0.0.7"})
    assert "disagree on the node rank" in str(caught.value)
    assert set(caught.value.said) == {"torchrun: GROUP_RANK=1", "Slurm: SLURM_NODEID=2"}
    assert "--node-rank" in str(caught.value)
    environ = TORCHRUN | SLURM | {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "10.0.0.7"}
    assert identify_node(environ, rank=1).rank == 1


@pytest.mark.parametrize(
    ("environ", "flags", "error"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, "one process per node"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
            {"count": 2, "head": "h"},
            "one process per node",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, {}, "one process per node"),
        (BEAKER | {"BEAKER_REPLICA_RANK": "4"}, {}, "a rank below the number of nodes"),
        (BEAKER | {"BEAKER_REPLICA_RANK": "-1"}, {}, "a number"),
        (PAI | {"RANK": "x"}, {}, "a number"),
    ],
)
def test_identify_node_refuses(environ: dict[str, str], flags: dict[str, Any], error: str) -> None:
    with pytest.raises(LauncherError, match=error):
        identify_node(environ, **flags)


def test_first_host() -> None:
    for text, host in {
        "node1": "node1",
        "b-2,a,c.d": "b-2",
        "gpu[001-003,007]-a,login": "gpu001-a",
        "r[1-2]n[09-10]": "r1n09",
        "n[98-101]": "n98",
        "n[5]": "n5",
    }.items():
        assert first_host(text) == host
    for text in ("n[1-", "n[a-b]", "n]1", "n[]"):
        with pytest.raises(LauncherError, match="a list of hosts"):
            first_host(text)


# --- several nodes without a cluster --------------------------------------------------------------

TORCHRUN_OF_8 = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "0",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (PAI, "RANK and WORLD_SIZE (PAI-DLC)"),
        (PAI | {"RANK": "0"}, "RANK and WORLD_SIZE (PAI-DLC)"),
        (PAI | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "RANK and WORLD_SIZE (PAI-DLC)"),
        (TORCHRUN, "torchrun"),
        (TORCHRUN_OF_8 | {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "16"}, "torchrun"),
        (PET, "torchrun's PET variables"),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "Slurm"),
        (SKYPILOT, "SkyPilot"),
        (BEAKER, "Beaker"),
        (OPEN_MPI, "Open MPI"),
    ],
)
def test_find_many_nodes_by_launcher(environ: dict[str, str], launcher: str) -> None:
    found = find_many_nodes(environ)
    assert found is not None
    assert found.launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        PAI | {"WORLD_SIZE": "1", "RANK": "0"},
        PAI | {"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"},
        PAI | {"WORLD_SIZE": "8", "MASTER_ADDR": "localhost"},
        PAI | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
        {"RANK": "1"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "many"},
        TORCHRUN_OF_8 | {"GROUP_WORLD_SIZE": "1"},
        TORCHRUN_OF_8 | {"GROUP_WORLD_SIZE": "1"} | SLURM,
        SLURM | {"SLURM_STEP_NUM_NODES": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        KUBERNETES,
        VOLCANO | {"VC_WORKER_NUM": "1"},
    ],
)
def test_find_many_nodes_on_one_node(environ: dict[str, str]) -> None:
    assert find_many_nodes(environ) is None
