"""Tests of the end of a run, and of nodes that leave it: supervisors over fake Rays."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.nodes import MakeNodes

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
    assert head.ray["pid"], "it has read its behaviour"
    nodes.behaviour(0, "fails")
    head.ends(
        93,
        "RAY_DIED: Ray did not start on this node: ray start exited with code 1",
        "no room for an object",
    )
    member.ends(91, "NOT_JOINED: the run did not begin: Ray did not start on this node")


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
    assert nodes.script_received(TERM)
    member.ends(0, "the run has ended: Ray has died on the head: ")


# --- signals --------------------------------------------------------------------------------------


def test_supervisor_head_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    head.signal(INT)
    head.ends(130, "this node received SIGINT; the run ends")
    assert nodes.script_received(INT)
    member.ends(0, "the run has ended: this node received SIGINT")


def test_supervisor_member_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, leaving, staying = nodes.start_running()
    leaving.signal(TERM)
    leaving.ends(143, "this node received SIGTERM; it leaves")
    head.ends(143, "rank 1 (", "received SIGTERM; the run ends")
    assert nodes.script_received(TERM)
    staying.ends(0, "the run has ended: rank 1 (")


def test_supervisor_elastic_member_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, elastic=True, grace_s=60.0)  # a drained node leaves earlier
    head, leaving, staying = nodes.start_running()
    leaving.signal(TERM)
    leaving.ends(143)
    head.said("leaves: this node received SIGTERM")
    nodes.release()
    head.ends(0)
    staying.ends(0)
    assert not nodes.script_received(TERM)


@pytest.mark.parametrize(("script", "grace_s"), [("deaf", 0.2), ("5", 2.0)])
def test_supervisor_stopped_ends_the_script(
    make_nodes: MakeNodes, script: str, grace_s: float
) -> None:
    """A script that ignores the signal is killed, and its exit code is ignored."""
    nodes = make_nodes(1, grace_s=grace_s)
    head = nodes.start(0, command=nodes.waiting_script(script))
    nodes.wait_running()
    head.signal(TERM)
    head.ends(143)
    assert nodes.script_received(TERM) == (script != "deaf")


# --- lost connections -----------------------------------------------------------------------------


def test_supervisor_head_silent(make_nodes: MakeNodes) -> None:
    """A stopped head, like a host that is cut off, closes no connection."""
    nodes = make_nodes(2)
    head, member = nodes.start_running()
    head.signal(signal.SIGSTOP)
    member.ends(
        94,
        f"HEAD_LOST: the head at 127.0.0.1:{nodes.port} is lost (no data was received for 5 s)",
        "whether the run continues there is unknown",
    )
    head.signal(signal.SIGCONT)
    head.said("; the run continues without it")
    nodes.release()
    head.ends(0)


def test_supervisor_head_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, *members = nodes.start_running()
    head.signal(KILL)
    assert head.wait() == 137
    for member in members:
        member.ends(94, "HEAD_LOST: the head at 127.0.0.1:", "is lost (the connection was closed)")
