"""The same supervisors: how a run ends, and how a node leaves it."""

from __future__ import annotations

import os
import signal

import pytest

from helmsman.controller._bootstrap.connection import LinkTimeouts
from tests.contract.helpers import wait_gone
from tests.controller.bootstrap.nodes import MakeCable, MakeNodes

pytestmark = pytest.mark.slow
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

# --- Ray ------------------------------------------------------------------------------------------


def test_supervisor_ray_fails_to_start_on_a_member(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    nodes.behaviour(1, "fails")
    head, other = nodes.start(0), nodes.start(2)
    other.said("joined the cluster")
    member = nodes.start(1)
    member.ends(
        93,
        "RAY_DIED: Ray did not start on this node: ray start exited with code 1",
        "no room for an object",
    )
    head.ends(
        91,
        "rank 1 (",
        "left before the run began: Ray did not start on this node",
        "no room for an object store",
    )
    other.ends(91, "the run did not begin: rank 1 (")


def test_supervisor_ray_fails_to_start_on_the_head(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(0, "waits", "fails")
    head, member = nodes.start_all()
    member.said("answers; waiting")
    assert head.ray["pid"], "so that it knows what it is to do"
    nodes.behaviour(0, "fails")
    head.ends(
        93,
        "RAY_DIED: Ray did not start on this node: ray start exited with code 1",
        "no room for an object",
    )
    member.ends(91, "NOT_JOINED: the run did not begin: Ray did not start on this node")


def test_supervisor_ray_does_not_answer(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, timeout_s=0.5)
    nodes.behaviour(0, "unlisted")
    nodes.start(0).ends(91, "1 of 1 nodes are missing: rank 0, its Ray does not respond yet")


def test_supervisor_ray_dies_on_a_member(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    os.kill(member.ray["pid"], KILL)
    member.ends(93, "RAY_DIED: Ray has died on this node: ray start was ended by SIGKILL")
    head.said("leaves: Ray has died on this node: ray start was ended by SIGKILL")
    nodes.release()
    head.ends(0)


def test_supervisor_ray_dies_on_the_head(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(0, "raylet")
    head, member = nodes.start_running()
    os.kill(head.ray["raylet"], KILL)
    head.ends(93, "RAY_DIED: Ray has died on the head: raylet has ended")
    assert nodes.script_was_told(TERM)
    member.ends(0, "the run has ended: Ray has died on the head: ")


# --- being told to stop ---------------------------------------------------------------------------


def test_supervisor_head_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    head.signal(INT)
    head.ends(130, "this node received SIGINT; the run ends")
    assert nodes.script_was_told(INT)
    member.ends(0, "the run has ended: this node received SIGINT")


def test_supervisor_head_stopped_while_it_waits(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, member = nodes.start(0), nodes.start(1)
    member.said("joined the cluster")
    head.signal(TERM)
    head.ends(143, "received SIGTERM")
    member.ends(91, "NOT_JOINED: the run did not begin: this node received SIGTERM")


def test_supervisor_member_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, leaving, staying = nodes.start_running()
    leaving.signal(TERM)
    leaving.ends(143, "this node received SIGTERM; it leaves")
    head.ends(143, "rank 1 (", "received SIGTERM; the run ends")
    assert nodes.script_was_told(TERM)
    staying.ends(0, "the run has ended: rank 1 (")


def test_supervisor_elastic_member_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, elastic=True, grace_s=60.0)  # not needed when the node is drained
    head, leaving, staying = nodes.start_running()
    leaving.signal(TERM)
    leaving.ends(143)
    head.said("leaves: this node received SIGTERM")
    nodes.release()
    head.ends(0)
    staying.ends(0)
    assert not nodes.script_was_told(TERM)


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


@pytest.mark.parametrize(("script", "grace_s"), [("deaf", 0.2), ("5", 2.0)])
def test_supervisor_stopped_ends_the_script(
    make_nodes: MakeNodes, script: str, grace_s: float
) -> None:
    """One that ignores the signal is killed, and its exit code does not count."""
    nodes = make_nodes(1, grace_s=grace_s)
    head = nodes.start(0, command=nodes.waiting_script(script))
    nodes.wait_running()
    head.signal(TERM)
    head.ends(143)
    assert nodes.script_was_told(TERM) == (script != "deaf")


# --- losing each other ----------------------------------------------------------------------------


def test_supervisor_reconnects(make_nodes: MakeNodes, make_cable: MakeCable) -> None:
    """When it is cut, and when only the node knows that it is lost."""
    patient = LinkTimeouts(
        heartbeat_s=0.2, connect_s=20.0, silent_s=60.0, refused_s=20.0, unreachable_s=20.0
    )
    nodes = make_nodes(2, timeouts=patient)
    cable = make_cable(nodes.port)
    head, member = nodes.start_running(cable.port)
    cable.cut()
    restored = "the connection to the head was lost and is restored"
    member.said(restored)
    before = head.said("has reconnected")
    cable.desert()
    member.said(restored, count=2)
    head.said("has reconnected", count=2)
    assert cable.is_given_up.wait(30.0), (
        "before it would be lost by its silence; the end of the run would wait for it"
    )
    nodes.release()
    head.ends(0)
    member.ends(0, "the script has ended with exit code 0")
    assert "is lost" not in head.output.removeprefix(before)


def test_supervisor_head_unreachable(make_nodes: MakeNodes, make_cable: MakeCable) -> None:
    """The kernel accepts connections for a stopped head, so it is unknown how the run ends."""
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head, member = nodes.start_running(cable.port)
    cable.cut_and_swallow()
    member.ends(
        94,
        "HEAD_LOST: the head at 127.0.0.1:",
        "cannot be reached",
        "whether the run continues there is unknown",
    )
    head.said("is lost: the connection was closed; the run continues without it")
    nodes.release()
    head.ends(0)


def test_supervisor_head_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, *members = nodes.start_running()
    head.signal(KILL)
    assert head.wait() == 137
    for member in members:
        member.ends(0, "the run has ended: its head has exited; this node has left")


@pytest.mark.parametrize("secret", ["a token of this test", "another"])
def test_supervisor_another_head_on_the_port(
    make_nodes: MakeNodes, make_cable: MakeCable, secret: str
) -> None:
    """A head that was restarted, or one of another job: the node does not belong to it."""
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head, member = nodes.start_running(cable.port)
    with_other_port = make_nodes(2)
    other = with_other_port.start(0, secret=secret)
    other.said("not connected")
    cable.target = with_other_port.port
    cable.cut()
    member.ends(0, "the run has ended: its head has exited, and another program has taken its port")
    nodes.release()
    head.ends(0)
    other.signal(TERM)
    other.ends(143)


def test_supervisor_stopped_while_it_awaits_the_head(make_nodes: MakeNodes) -> None:
    """It waits to learn whether its head has gone, which is why Ray would end by itself; but not
    when it is told to stop.
    """
    nodes = make_nodes(2, grace_s=0.1)
    head, member = nodes.start_running()
    head.signal(signal.SIGSTOP)
    ray = member.ray["pid"]
    os.kill(ray, KILL)
    wait_gone({"its Ray": ray})
    member.signal(TERM)
    member.ends(143)


def test_supervisor_member_killed_returns_too_late(make_nodes: MakeNodes) -> None:
    """It takes its Ray along, and the run goes on; the new one is not told that the run has not
    begun.
    """
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    ray = member.ray["pid"]
    member.signal(KILL)
    head.said("is lost: the connection was closed; the run continues without it")
    wait_gone({"its Ray": ray})
    nodes.behaviour(1, "hangs")
    (nodes.folder / "1" / "started").unlink()
    late = nodes.start(1)
    assert late.ray["pid"], "it is in the middle of its start"
    nodes.release()
    head.ends(0)
    late.ends(
        91,
        "NOT_JOINED: the run has ended before this node had joined: the script has ended with "
        "exit code 0",
    )
    assert "did not begin" not in late.output
