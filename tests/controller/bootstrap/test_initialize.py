"""``helmsman.initialize`` in scripts: one that is alone, and ones that belong to a cluster."""

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

from helmsman.controller._node.run_registry import RUN_LABEL, RUN_VARIABLE
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

node = {"num_cpus": 2, "num_gpus": 4, "labels": {"helmsman-run": "run-1"}, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(num_cpus=1, resources={"NPU": 8}, labels={"helmsman-run": "run-1"})
print(json.dumps(cluster.address), flush=True)
try:
    signal.sigwait({signal.SIGTERM})
finally:
    cluster.shutdown()
"""


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != RUN_VARIABLE}
    return {**ours, "PYTHONPATH": str(ROOT), **more}


def run(source: str, **environ: str) -> list[dict[str, Any]]:
    """What a script has told."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + source],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes that belong to run-1."""
    signals = {signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # which the child inherits, and waits for
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment(RAY_AUTH_MODE="disabled"), stdout=subprocess.PIPE, text=True
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        assert cluster.stdout is not None
        lines = iter(cluster.stdout)
        yield next(json.loads(line) for line in lines if line.startswith('"'))
    finally:
        cluster.terminate()
        cluster.communicate(timeout=30)


def test_alone_a_cluster_of_this_machine_is_started_and_ends_with_the_script() -> None:
    source = """
import ray
with initialize(num_cpus=3, num_gpus=2, resources={"disk": 1.0}, preload=None) as cluster:
    again = initialize()
    total = dict(cluster.nodes[0].total)
    tell(address=cluster.address, nodes=len(cluster.nodes), embedded=cluster.is_embedded, devices=cluster.num_devices,
         cpus=total["CPU"], disk=total["disk"], again=again == cluster)
tell(connected=ray.is_initialized())
cluster.close()
"""
    first, last = run(source)
    assert first == {
        "address": first["address"],
        "nodes": 1,
        "embedded": True,
        "devices": {"GPU": 2},
        "cpus": 3.0,
        "disk": 1.0,
        "again": True,
    }
    assert last == {"connected": False}
    host, _, port = first["address"].rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5.0)


ATTACH = """
with initialize() as cluster:
    tell(address=cluster.address, nodes=len(cluster.nodes), embedded=cluster.is_embedded, devices=cluster.num_devices)
"""


@pytest.mark.parametrize("run_id", ["", "run-1"], ids=["somebody's", "its own run's"])
def test_the_cluster_at_ray_address_is_joined_and_stays(address: str, run_id: str) -> None:
    environ = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", **({RUN_VARIABLE: run_id} if run_id else {})}
    for _ in range(2):  # the first has left, and ended nothing
        assert run(ATTACH, **environ) == [
            {"address": address, "nodes": 2, "embedded": False, "devices": {"GPU": 4, "NPU": 8}},
        ]


REFUSED = """
import ray
try:
    initialize()
except Exception as error:
    tell(kind=type(error).__name__, text=str(error), connected=ray.is_initialized())
"""


def test_another_runs_cluster_is_left_at_once(address: str) -> None:
    (told,) = run(REFUSED, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled", **{RUN_VARIABLE: "run-2"})
    assert (told["kind"], told["connected"]) == ("ClusterMismatchError", False)
    for fact in (address, "its nodes belong to run-1", "started on run run-2", RUN_VARIABLE, "start it again"):
        assert fact in told["text"]
    assert RUN_LABEL == "helmsman-run", "as the cluster above has it"


def test_nobody_answers_at_ray_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    (told,) = run(REFUSED, RAY_ADDRESS=address)
    assert (told["kind"], told["connected"]) == ("ClusterNotFoundError", False)
    assert f"there is no Ray cluster at '{address}': nobody answers there" in told["text"]


TWO_NODES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"}
MAKE_SCHEDULER = """
from helmsman import make_scheduler
try:
    make_scheduler("ray", num_cpus=1).close()
except Exception as error:
    tell(kind=type(error).__name__, text=str(error))
"""


@pytest.mark.parametrize("source", [REFUSED, MAKE_SCHEDULER], ids=["initialize", "make_scheduler"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_initialize_refuses_a_ray_for_each_of_several_nodes(source: str, rank: str) -> None:
    """Each node would train alone, and no one would notice."""
    (told,) = run(source, **{**TWO_NODES, "RANK": rank})
    assert told["kind"] == "ClusterNotUpError"
    for fact in (f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=10.0.0.7", "helmsman up -- ", " -c ", "RAY_ADDRESS=local"):
        assert fact in told["text"]


ALONE = """
with initialize(num_cpus=1, preload=None) as cluster:
    tell(nodes=len(cluster.nodes), embedded=cluster.is_embedded, auth=os.environ["RAY_AUTH_MODE"])
"""


def test_initialize_starts_a_ray_on_one_of_several_nodes_when_asked() -> None:
    assert run(ALONE, **TWO_NODES, RAY_ADDRESS="local") == [{"nodes": 1, "embedded": True, "auth": "token"}]


def test_initialize_joins_ray_address_under_a_launcher_of_several_nodes(address: str) -> None:
    (told,) = run(ATTACH, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled", **TWO_NODES)
    assert (told["address"], told["embedded"]) == (address, False)


CHOOSE = """
from helmsman.controller._ray_backend.address import choose_address
tell(address=choose_address(None if {is_default} else "local"))
"""


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.7"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"},
    ],
    ids=["one node", "processes of one node"],
)
def test_choose_address_is_local_on_one_node(environ: dict[str, str]) -> None:
    assert run(CHOOSE.format(is_default=True), **environ) == [{"address": "local"}]


def test_choose_address_logs_a_local_one_on_several_nodes() -> None:
    script = PROLOGUE + CHOOSE.format(is_default=False)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(**TWO_NODES), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"address": "local"}
    for fact in ("Ray starts on this node alone", "RANK=1, WORLD_SIZE=2, MASTER_ADDR=10.0.0.7"):
        assert fact in done.stderr
