"""The same supervisors: how a run ends, and how a node leaves it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.contract.helpers import wait_gone
from tests.controller.bootstrap.nodes import MakeCable, MakeNodes, script

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

# --- Ray ----------------------------------------------------------------------------------------------------------------


def test_ray_that_does_not_start_on_a_member(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    nodes.behaviour(1, "fails")
    head, other = nodes.start(0), nodes.start(2)
    other.said("joined the cluster")
    member = nodes.start(1)
    member.ends(93, "RAY_DIED: Ray did not start on this node: ray start exited with code 1", "no room for an object")
    head.ends(91, "rank 1 (", "left before the run began: Ray did not start on this node", "no room for an object store")
    other.ends(91, "the run did not begin: rank 1 (")


def test_ray_that_does_not_start_on_the_head(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(0, "waits", "fails")
    head, member = nodes.start_all()
    member.said("answers; waiting")
    assert head.ray["pid"], "so that it knows what it is to do"
    nodes.behaviour(0, "fails")
    head.ends(93, "RAY_DIED: Ray did not start on this node: ray start exited with code 1", "no room for an object")
    member.ends(91, "NOT_JOINED: the run did not begin: Ray did not start on this node")


def test_ray_that_never_says_that_it_is_up(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, ray_start_s=0.3)
    nodes.behaviour(0, "hangs")
    nodes.start(0).ends(93, "RAY_DIED: Ray did not start on this node within 0.3 s")


def test_ray_that_is_up_and_does_not_answer(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, timeout_s=0.5)
    nodes.behaviour(0, "unlisted")
    nodes.start(0).ends(91, "1 of 1 nodes are missing: rank 0, its own Ray does not answer yet")


@pytest.mark.parametrize("which", ["pid", "raylet"])
def test_rays_death_on_a_member_is_its_own_and_the_run_goes_on(make_nodes: MakeNodes, which: str) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(1, "raylet")
    head, member = nodes.start_all()
    nodes.wait_running()
    os.kill(member.ray[which], KILL)
    how = {"pid": "ray start was ended by SIGKILL", "raylet": "raylet has ended"}[which]
    member.ends(93, f"RAY_DIED: Ray has died on this node: {how}")
    head.said(f"leaves: Ray has died on this node: {how}")
    nodes.release()
    head.ends(0)
    nodes.wait_nothing_left()


@pytest.mark.parametrize("which", ["pid", "raylet"])
def test_rays_death_on_the_head_ends_the_run(make_nodes: MakeNodes, which: str) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(0, "raylet")
    head, member = nodes.start_all()
    nodes.wait_running()
    os.kill(head.ray[which], KILL)
    head.ends(93, "RAY_DIED: Ray has died on the head: ")
    assert nodes.script_was_told(TERM)
    member.ends(0, "the run has ended: Ray has died on the head: ")
    nodes.wait_nothing_left()


def test_ray_that_ignores_being_told_to_end_is_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, command=script("pass"))
    nodes.behaviour(0, "raylet", "stubborn")
    nodes.start(0).ends(0)
    nodes.wait_nothing_left()


# --- being told to stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130)])
def test_the_head_is_told_to_stop(make_nodes: MakeNodes, number: signal.Signals, code: int) -> None:
    nodes = make_nodes(2)
    head, member = nodes.start_all()
    nodes.wait_running()
    head.signal(number)
    head.ends(code, f"this node was told to stop by {number.name}; the run ends")
    assert nodes.script_was_told(number)
    member.ends(0, f"the run has ended: this node was told to stop by {number.name}")
    nodes.wait_nothing_left()


def test_the_head_is_told_to_stop_while_it_waits(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, member = nodes.start(0), nodes.start(1)
    member.said("joined the cluster")
    head.signal(TERM)
    head.ends(143, "told to stop by SIGTERM")
    member.ends(91, "NOT_JOINED: the run did not begin: this node was told to stop by SIGTERM")
    nodes.wait_nothing_left()


def test_a_member_is_told_to_stop_and_the_run_ends(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, leaving, staying = nodes.start_all()
    nodes.wait_running()
    leaving.signal(TERM)
    leaving.ends(143, "this node was told to stop by SIGTERM; it leaves")
    head.ends(143, "rank 1 (", "was told to stop by SIGTERM; the run ends")
    assert nodes.script_was_told(TERM)
    staying.ends(0, "the run has ended: rank 1 (")
    nodes.wait_nothing_left()


def test_a_member_of_an_elastic_run_is_told_to_stop_and_the_run_goes_on(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, elastic=True, grace_s=60.0)  # which nobody needs whose node is drained
    head, leaving, staying = nodes.start_all()
    nodes.wait_running()
    leaving.signal(TERM)
    leaving.ends(143)
    head.said("leaves: this node was told to stop by SIGTERM")
    nodes.release()
    head.ends(0)
    staying.ends(0)
    assert not nodes.script_was_told(TERM)


def test_a_member_of_an_elastic_run_whose_work_does_not_end_leaves_after_the_grace(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, elastic=True, grace_s=0.5)
    nodes.behaviour(1, "busy")
    head, leaving = nodes.start_all()
    nodes.wait_running()
    leaving.signal(TERM)
    leaving.ends(143)
    nodes.release()
    head.ends(0)
    nodes.wait_nothing_left()


def test_a_member_is_told_to_stop_before_there_is_a_head(make_nodes: MakeNodes) -> None:
    member = make_nodes(2).start(1)
    member.said("does not answer")
    member.signal(TERM)
    member.ends(143, "this node was told to stop by SIGTERM; it leaves")


def test_a_script_that_ignores_it_is_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, grace_s=0.2)
    head = nodes.start(0, command=nodes.waiting_script("deaf"))
    nodes.wait_running()
    head.signal(TERM)
    head.ends(143)
    nodes.wait_nothing_left()


def test_the_run_that_is_told_to_stop_has_that_exit_code_whatever_the_script_has(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1)
    head = nodes.start(0, command=nodes.waiting_script("5"))
    nodes.wait_running()
    head.signal(TERM)
    head.ends(143)
    assert nodes.script_was_told(TERM)


# --- losing each other --------------------------------------------------------------------------------------------------


def test_a_cut_connection_is_made_again(make_nodes: MakeNodes, make_cable: MakeCable) -> None:
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    nodes.wait_running()
    for times in (1, 2):
        cable.cut()
        member.said("the connection to the head was lost, and is back", count=times)
        head.said("is back", count=times)
    nodes.release()
    head.ends(0)
    member.ends(0, "the script has ended with exit code 0")


def test_a_connection_that_only_the_member_knows_to_be_lost(make_nodes: MakeNodes, make_cable: MakeCable) -> None:
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    nodes.wait_running()
    cable.desert()
    head.said("is back")
    assert cable.is_given_up.wait(4.0), "before it would be lost by its silence; the end of the run would wait for it"
    nodes.release()
    head.ends(0)
    member.ends(0, "the script has ended with exit code 0")
    assert "is lost" not in head.output


def test_a_head_that_cannot_be_reached(make_nodes: MakeNodes, make_cable: MakeCable) -> None:
    """What answers is a kernel that takes connections for a head that does nothing: nobody knows how the run ends."""
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    nodes.wait_running()
    cable.cut_and_swallow()
    member.ends(94, "HEAD_LOST: the head at 127.0.0.1:", "cannot be reached", "whether the run goes on there is not known")
    head.said("is lost: the connection was closed; the run goes on without it")
    nodes.release()
    head.ends(0)


def test_a_head_that_is_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, *members = nodes.start_all()
    nodes.wait_running()
    head.signal(KILL)
    assert head.wait() == 137
    for member in members:
        member.ends(0, "the run has ended: its head is gone; this node has left")
    nodes.wait_nothing_left()


@pytest.mark.parametrize("secret", ["a token of this test", "another"])
def test_another_runs_head_has_the_port(make_nodes: MakeNodes, make_cable: MakeCable, secret: str) -> None:
    """A head that was started anew, or one of another job: the node does not belong to it."""
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    nodes.wait_running()
    with_other_port = make_nodes(2)
    other = with_other_port.start(0, secret=secret)
    other.said("never heard of")
    cable.target = with_other_port.port
    cable.cut()
    member.ends(0, "the run has ended: its head is gone, and another program has taken its port")
    nodes.release()
    head.ends(0)
    other.signal(TERM)
    other.ends(143)


def test_a_node_whose_ray_dies_with_a_silent_head_can_be_told_to_stop(make_nodes: MakeNodes) -> None:
    """It waits to learn whether its head has gone, which is why Ray would end by itself; but not when it is told to stop."""
    nodes = make_nodes(2, grace_s=0.1)
    head, member = nodes.start_all()
    nodes.wait_running()
    head.signal(signal.SIGSTOP)
    ray = member.ray["pid"]
    os.kill(ray, KILL)
    wait_gone({"its Ray": ray})
    member.signal(TERM)
    member.ends(143)


def test_a_member_that_is_killed_takes_its_ray_along_and_the_run_goes_on(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    head, member = nodes.start_all()
    nodes.wait_running()
    ray = member.ray["pid"]
    member.signal(KILL)
    head.said("is lost: the connection was closed; the run goes on without it")
    wait_gone({"its Ray": ray})
    nodes.release()
    head.ends(0)


def test_a_node_that_comes_late_and_has_not_joined_when_the_run_ends(make_nodes: MakeNodes) -> None:
    """The run had begun, and is not said to have not."""
    nodes = make_nodes(2)
    head, member = nodes.start_all()
    nodes.wait_running()
    member.signal(KILL)
    head.said("is lost")
    nodes.behaviour(1, "hangs")
    (nodes.folder / "1" / "started").unlink()
    late = nodes.start(1)
    assert late.ray["pid"], "it is in the middle of its start"
    nodes.release()
    head.ends(0)
    late.ends(91, "NOT_JOINED: the run has ended before this node had joined: the script has ended with exit code 0")
    assert "did not begin" not in late.output
