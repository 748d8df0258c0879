"""Tests of ``helmsman.initialize`` in scripts without a cluster, and in scripts of a cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.controller._scheduler.run_registry import RUN_LABEL, RUN_VARIABLE
from tests.contract.helpers import ROOT

pytest.importorskip("ray", reason="it is about Ray's clusters")

PROLOGUE = """
import json, os
from helmsman import initialize

def tell(**facts):
    print(json.dumps(facts), flush=True)

"""
CLUSTER = """
import json, signal
from ray.cluster_utils import Cluster
from helmsman.rpc_server._ray_forks.ray_patches import only_core_processes

node = {"num_cpus": 2, "num_gpus": 4, "resources": {"NPU": 8}, "labels": {"helmsman-run": "run-1"}}
with only_core_processes():
    cluster = Cluster(initialize_head=True, head_node_args=node)
print(json.dumps(cluster.address), flush=True)
try:
    signal.sigwait({signal.SIGTERM})
finally:
    cluster.shutdown()
"""


def environment(**more: str) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name != RUN_VARIABLE
    }
    return {**ours, "PYTHONPATH": str(ROOT), **more}


def execute(source: str, **environ: str) -> tuple[list[dict[str, Any]], str]:
    """Run a script, and return its printed facts and its log."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + source],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ], done.stderr


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster whose node belongs to run-1."""
    signals = {signal.SIGTERM}
    # The child inherits the mask, and waits for the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment(RAY_AUTH_MODE="disabled"),
        stdout=subprocess.PIPE,
        text=True,
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        assert cluster.stdout is not None
        lines = iter(cluster.stdout)
        yield next(json.loads(line) for line in lines if line.startswith('"'))
    finally:
        cluster.terminate()
        cluster.communicate(timeout=30)


TWO_NODES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"}


def test_initialize_starts_a_cluster_that_ends_with_the_script() -> None:
    """On one of several nodes, a script must ask for a cluster of its own."""
    source = """
with initialize(num_cpus=3, num_gpus=2, resources={"disk": 1.0}, preload=None) as cluster:
    again = initialize()
    total = dict(cluster.nodes[0].total)
    tell(address=cluster.address, nodes=len(cluster.nodes), embedded=cluster.is_embedded,
         devices=cluster.num_devices, cpus=total["CPU"], disk=total["disk"],
         again=again == cluster, auth=os.environ["RAY_AUTH_MODE"])
import ray
tell(connected=ray.is_initialized())
cluster.close()
"""
    (first, last), _ = execute(source, **TWO_NODES, RAY_ADDRESS="local")
    host, _, port = first.pop("address").rpartition(":")
    assert first == {
        "nodes": 1,
        "embedded": True,
        "devices": {"GPU": 2},
        "cpus": 3.0,
        "disk": 1.0,
        "again": True,
        "auth": "token",
    }
    assert last == {"connected": False}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5.0)


def test_initialize_joins_the_cluster_at_ray_address(address: str) -> None:
    """A cluster of another user or of the same run is joined, one of another run is refused."""
    source = f"""
import ray
for more in ({{}}, {{"{RUN_VARIABLE}": "run-1"}}, {TWO_NODES}):
    os.environ.update(more)
    with initialize() as cluster:
        tell(address=cluster.address, nodes=len(cluster.nodes), embedded=cluster.is_embedded,
             devices=cluster.num_devices)
os.environ["{RUN_VARIABLE}"] = "run-2"
try:
    initialize()
except Exception as error:
    tell(kind=type(error).__name__, text=str(error), connected=ray.is_initialized())
"""
    (*joined, refused), _ = execute(source, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
    assert joined == 3 * [
        {"address": address, "nodes": 1, "embedded": False, "devices": {"GPU": 4, "NPU": 8}}
    ]
    assert (refused["kind"], refused["connected"]) == ("ClusterMismatchError", False)
    for fact in (
        address,
        "its nodes belong to run-1",
        "expected run run-2",
        RUN_VARIABLE,
        "start it again",
    ):
        assert fact in refused["text"]
    assert RUN_LABEL == "helmsman-run", "the cluster above uses this label"


def test_initialize_refuses_a_ray_for_each_of_several_nodes() -> None:
    """Otherwise each node would train alone. A cluster that the script asks for is logged.

    Each of several processes on one node may start its own. An address where no process answers is
    refused.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    source = f"""
import ray
from helmsman import make_scheduler
from helmsman.controller._scheduler.ray.cluster_state import choose_address
for rank in "01":
    os.environ["RANK"] = rank
    for start in (initialize, lambda: make_scheduler("ray", num_cpus=1).close()):
        try:
            start()
        except Exception as error:
            tell(kind=type(error).__name__, rank=rank, text=str(error))
addresses = [choose_address("local")]
for environ in ({{"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}}, {{"RANK": "0", "WORLD_SIZE": "1"}}):
    os.environ.update(environ)
    addresses.append(choose_address(None))
tell(addresses=addresses)
os.environ["RAY_ADDRESS"] = "{address}"
try:
    initialize()
except Exception as error:
    tell(kind=type(error).__name__, text=str(error), connected=ray.is_initialized())
"""
    (*refused, chosen, last), logged = execute(source, **TWO_NODES)
    assert len(refused) == 4
    for each in refused:
        assert each["kind"] == "ClusterNotUpError"
        start = "helmsman up -- "
        for fact in (
            f"RANK={each['rank']}",
            "WORLD_SIZE=2",
            "MASTER_ADDR=10.0.0.7",
            start,
            " -c ",
            "RAY_ADDRESS=local",
        ):
            assert fact in each["text"]
    assert chosen["addresses"] == ["local"] * 3
    assert "Ray starts on this node only" in logged
    assert "RANK=1, WORLD_SIZE=2, MASTER_ADDR=10.0.0.7" in logged
    assert (last["kind"], last["connected"]) == ("ClusterNotFoundError", False)
    assert f"there is no Ray cluster at '{address}': nothing answers there" in last["text"]
