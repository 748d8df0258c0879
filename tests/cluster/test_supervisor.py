"""Tests of the beginning of a run: supervisors of several nodes over fake Rays."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from helmsman.controller._scheduler.run_registry import RUN_VARIABLE
from tests.cluster.nodes import MakeNodes, script
from tests.contract.helpers import is_running

TERM, KILL = signal.SIGTERM, signal.SIGKILL

# --- success ------------------------------------------------------------------------------------


def test_supervisor_exit_code_of_the_script(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, command=script("import os; os.kill(os.getpid(), 9)"))
    head, *others = nodes.start_all()
    head.ends(137, "3 nodes with 6 CPU at 127.0.0.1:6379, all there after", "the script starts")
    for node in others:
        node.ends(
            0,
            "joined the cluster at 127.0.0.1:6379",
            "the run has ended: the script has ended with exit code 137; this node has left",
        )


def test_supervisor_of_one_node(make_nodes: MakeNodes) -> None:
    """The script has the variables of the cluster, and its processes end with the run."""
    source = (
        "import os, subprocess\n"
        "print({name: value for name, value in os.environ.items() if 'RAY' in name or 'HELMSMAN' "
        "in name})\n"
        "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)\n"
        "os._exit(3)"
    )
    head = make_nodes(1, port=0, command=script(source)).start(0)
    head.ends(3, "1 node with 2 CPU at 127.0.0.1:")
    port = int(head.ray["flags"]["--port"])
    assert port >= 20_000, "no other node needs to know it beforehand"
    for fact in (
        f"'RAY_ADDRESS': '127.0.0.1:{port}'",
        f"'{RUN_VARIABLE}': '{head.plan.run_id}'",
        f"'RAY_AUTH_TOKEN_PATH': '{head.plan.folder}/token'",
        "'RAY_AUTH_MODE': 'token'",
    ):
        assert fact in head.output
    (pid,) = [line for line in head.output.splitlines() if line.isdigit()]
    assert not is_running(int(pid))


@pytest.mark.parametrize("secret", ["a token of this test", ""])
def test_supervisor_shares_the_heads_token_and_variables(
    make_nodes: MakeNodes, secret: str
) -> None:
    """The other node starts before the head."""
    nodes = make_nodes(2, secret=secret, command=script("pass"))
    member = nodes.start(1, cluster_settings=[])
    member.said("does not answer")
    head = nodes.start(0)
    rays = [node.ray for node in (head, member)]
    tokens = [Path(ray["environ"]["RAY_AUTH_TOKEN_PATH"]).read_text() for ray in rays]
    assert tokens[0] == tokens[1] != ""
    names = {setting.name for setting in head.plan.cluster_settings}
    assert len(names) > 5
    for name in names:
        assert rays[0]["environ"][name] == rays[1]["environ"][name]
    assert rays[1]["flags"]["--address"] == "127.0.0.1:6379"
    assert rays[1]["flags"]["--labels"] == f"helmsman-run={head.plan.run_id},helmsman-rank=1"
    head.ends(0)
    member.ends(0)
    assert len(member.lines("Connect call failed")) == 1, "reported once, not at every attempt"


def test_supervisor_script_that_cannot_start(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=["no-such-program", "x"])
    head, member = nodes.start_all()
    head.ends(
        90, "PREFLIGHT", "the script cannot be started: no-such-program: No such file or directory"
    )
    member.ends(0, "the run has ended: the script cannot be started: no-such-program")


# --- rendezvous -----------------------------------------------------------------------------------


def test_supervisor_missing_rank(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    member = nodes.start(1)
    member.said("does not answer")
    head = nodes.start(0, timeout_s=4.0)
    head.ends(
        91,
        "NOT_JOINED: 1 of 3 nodes are missing: rank 2, not connected, after 4 s",
        "Check the output of the missing nodes",
        "--timeout",
    )
    member.ends(
        91, "NOT_JOINED: the run did not begin: 1 of 3 nodes are missing: rank 2, not connected"
    )


def test_supervisor_missing_head(make_nodes: MakeNodes) -> None:
    member = make_nodes(2, timeout_s=0.5).start(1)
    member.ends(
        91,
        "NOT_JOINED: the head at 127.0.0.1:",
        "does not answer",
        "after 0.5 s: rank 0 is missing. Check its output",
    )


def test_supervisor_missing_devices(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    member = nodes.start(1, num_devices=8, resources={"CPU": 2.0, "GPU": 6.0})
    head = nodes.start(0)
    head.said("127.0.0.1), 6 of 8 GPU")
    head.signal(TERM)
    head.ends(143, "1 of 2 nodes are missing: rank 1 (")
    member.ends(91)


def test_supervisor_refuses_nodes(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, command=script("pass"))
    head = nodes.start(0)
    other_python = {"python": "3.12.1", "ray": "2.60.0", "helmsman": "0.1.0"}
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (
            {"versions": other_python},
            (
                "versions differ: python 3.12.1 there, 3.11.7 on the head",
                "Install the same on every node",
            ),
        ),
        ({"versions": {}}, ("ray none there, 2.60.0 on the head",)),
        ({"count": 4}, ("it expects 4 nodes, the head expects 3",)),
        ({"rank": 3}, ("its rank is 3", "waits for ranks 1 to 2")),
    ]
    for changes, facts in refused:
        nodes.start(**{"rank": 1, **changes}).ends(
            92, "REFUSED: the head at 127.0.0.1:", "rejected this node", *facts
        )
        for fact in ("is rejected", *facts):
            assert fact in head.output
    nodes.start(1, secret="another").ends(
        92, f"127.0.0.1:{nodes.port} has a different key", "--token-file, or HELMSMAN_TOKEN"
    )
    assert "a process on 127.0.0.1 was refused: it has another token" in head.output
    first = nodes.start(1)
    first.said("joined the cluster")
    nodes.start(1).ends(
        92, "REFUSED", "rank 1 (", "is here already; every node needs a rank of its own"
    )
    nodes.start(2).ends(0)
    head.ends(0)
    first.ends(0)


def test_supervisor_node_leaves_before_the_run(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(4)
    head, leaving, staying = nodes.start(0), nodes.start(1), nodes.start(2)
    for member in (leaving, staying):
        member.said("joined the cluster")
    leaving.signal(TERM)
    leaving.ends(143, "this node received SIGTERM; it leaves")
    head.ends(91, "NOT_JOINED: rank 1 (", "left before the run began: this node received SIGTERM")
    staying.ends(91, "NOT_JOINED: the run did not begin: rank 1 (")


def test_supervisor_control_port_taken_late(make_nodes: MakeNodes) -> None:
    """The port was free when the plan was made."""
    nodes = make_nodes(2)
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.start(0).ends(
            90,
            f"PREFLIGHT: port {nodes.port}, to which the other nodes connect, cannot be bound",
            "--control-port",
        )
