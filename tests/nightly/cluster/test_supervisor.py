"""Tests of rarer beginnings and ends of a run: supervisors over fake Rays."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket

from tests.cluster.nodes import MakeNodes, script
from tests.contract.helpers import wait_gone

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def test_supervisor_many_missing_ranks(make_nodes: MakeNodes) -> None:
    head = make_nodes(30, timeout_s=0.3).start(0)
    head.ends(91, "29 of 30 nodes are missing", "rank 8, not connected; and 21 more, ranks 9-29")


def test_supervisor_prints_a_line_for_each_change(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head = nodes.start(0)
    head.said("rank 1, not connected; rank 2, not connected")
    member = nodes.start(1)
    member.said("1 of 3 nodes are missing: rank 2, not connected")
    head.signal(TERM)
    head.ends(143)
    member.ends(91)
    told = [line.partition(" (after")[0] for line in head.lines("are missing")]
    assert len(told) == len(set(told))
    assert told[-1] == "1 of 3 nodes are missing: rank 2, not connected"
    assert len(told) <= 5
    assert set(member.lines("are missing")) <= set(told), "the other nodes print it, too"


def test_supervisor_node_killed_before_the_run_returns(make_nodes: MakeNodes) -> None:
    """The run waits for its return, and until Ray has dropped the killed node."""
    nodes = make_nodes(3, command=script("pass"))
    head, first = nodes.start(0), nodes.start(1)
    first.said("joined the cluster")
    first.signal(KILL)
    head.said("connection lost")
    nodes.behaviour(1, "twice")
    again, other = nodes.start(1), nodes.start(2)
    head.said("Ray still counts the one that was killed before it")
    nodes.behaviour(1, "")
    head.ends(0)
    again.ends(0)
    other.ends(0)


def test_supervisor_head_with_too_many_open_files(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=script("pass"), timeout_s=60.0)
    head = nodes.start(0)
    head.said("rank 1, not connected")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.prlimit(head.process.pid, resource.RLIMIT_NOFILE, (40, hard))
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", nodes.port)))
        head.said("could not be accepted: Too many open files")
    nodes.start(1).ends(0)
    head.ends(0)


def test_supervisor_ray_does_not_answer(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, timeout_s=0.5)
    nodes.behaviour(0, "unlisted")
    nodes.start(0).ends(91, "1 of 1 nodes are missing: rank 0, its Ray does not respond yet")


def test_supervisor_head_stopped_while_it_waits(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, member = nodes.start(0), nodes.start(1)
    member.said("joined the cluster")
    head.signal(TERM)
    head.ends(143, "received SIGTERM")
    member.ends(91, "NOT_JOINED: the run did not begin: this node received SIGTERM")


def test_supervisor_elastic_member_leaves_after_grace(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, elastic=True, grace_s=0.5)
    nodes.behaviour(1, "busy")
    head, leaving = nodes.start_running()
    leaving.signal(TERM)
    leaving.ends(143)
    nodes.release()
    head.ends(0)


def test_supervisor_member_stopped_without_a_head(make_nodes: MakeNodes) -> None:
    member = make_nodes(2).start(1)
    member.said("does not answer")
    member.signal(TERM)
    member.ends(143, "this node received SIGTERM; it leaves")


def test_supervisor_member_killed_returns_too_late(make_nodes: MakeNodes) -> None:
    """Its Ray ends with it, and the run continues without it."""
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    ray = member.ray["pid"]
    member.signal(KILL)
    head.said("is lost: the connection was closed; the run continues without it")
    wait_gone({"its Ray": ray})
    nodes.behaviour(1, "hangs")
    (nodes.folder / "1" / "started").unlink()
    late = nodes.start(1)
    assert late.ray["pid"], "its Ray is starting"
    nodes.release()
    head.ends(0)
    late.ends(
        91,
        "NOT_JOINED: the run has ended before this node had joined: the script has ended with "
        "exit code 0",
    )
    assert "did not begin" not in late.output
