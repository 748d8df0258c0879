"""The supervisors of a run's nodes, as processes of this machine, over a Ray that does what a test wants."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.controller.bootstrap.node_plan import RUN_VARIABLE
from tests.bootstrap.nodes import Cable, Nodes
from tests.contract.helpers import is_running, wait_gone

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """Make a run; nothing of it may be left in the end."""
    made: list[Nodes] = []

    def make(count: int, **changes: Any) -> Nodes:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Nodes(folder, count, **changes))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


@pytest.fixture
def make_cable() -> Iterator[Callable[[int], Cable]]:
    made: list[Cable] = []

    def make(port: int) -> Cable:
        made.append(Cable(port))
        return made[-1]

    yield make
    for cable in made:
        cable.close()


def script(source: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", source]


# --- a clean life -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_exit_code_of_the_script_is_that_of_the_head(make_nodes: MakeNodes, source: str, code: int) -> None:
    nodes = make_nodes(3, command=script(source))
    head, *members = nodes.start_all()
    head.ends(code, "3 nodes with 6 CPU at 127.0.0.1:6379, all there after", "the script starts")
    for member in members:
        member.ends(
            0,
            "joined the cluster at 127.0.0.1:6379",
            f"the run has ended: the script has ended with exit code {code}; this node has left",
        )
    nodes.wait_nothing_left()


def test_one_node(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, port=0, command=script("raise SystemExit(3)"))
    head = nodes.start(0)
    head.ends(3, "1 node with 2 CPU at 127.0.0.1:")
    assert int(head.ray["flags"]["--port"]) >= 20_000, "one that nobody has to know beforehand"


def test_the_script_is_told_its_cluster(make_nodes: MakeNodes) -> None:
    shown = "import os; print({name: value for name, value in os.environ.items() if 'RAY' in name or 'HELMSMAN' in name})"
    nodes = make_nodes(1, command=script(shown))
    head = nodes.start(0)
    head.ends(0)
    told = head.output
    assert "'RAY_ADDRESS': '127.0.0.1:6379'" in told
    assert f"'{RUN_VARIABLE}': '{head.plan.run_id}'" in told
    assert f"'RAY_AUTH_TOKEN_PATH': '{head.plan.folder}/token'" in told
    assert "'RAY_AUTH_MODE': 'token'" in told


@pytest.mark.parametrize("secret", ["a token of this test", ""])
def test_all_nodes_have_the_heads_token_and_variables(make_nodes: MakeNodes, secret: str) -> None:
    nodes = make_nodes(2, secret=secret, command=script("pass"))
    head = nodes.start(0)
    member = nodes.start(1, cluster_settings=[])
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


def test_what_the_script_leaves_behind_goes_with_the_run(make_nodes: MakeNodes) -> None:
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    nodes = make_nodes(1, command=script(leaves))
    head = nodes.start(0)
    head.ends(0)
    (pid,) = [line for line in head.output.splitlines() if line.isdigit()]
    assert not is_running(int(pid))


def test_a_script_that_cannot_be_started(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=["no-such-program", "x"])
    head, member = nodes.start_all()
    head.ends(90, "UnfitNodeError", "the script cannot be started: no-such-program: No such file or directory")
    member.ends(0, "the run has ended: the script cannot be started: no-such-program")


# --- coming -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_never_comes(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    member = nodes.start(1)
    member.said("does not answer")
    head = nodes.start(0, timeout_s=1.5)
    head.ends(
        91,
        "NotJoinedError: 1 of 3 nodes are missing: rank 2, never heard of, after 1.5 s",
        "There are: rank 0 (127.0.0.1), rank 1 (127.0.0.1)",
        "Look at what the missing nodes have printed",
        "--timeout",
    )
    member.ends(91, "NotJoinedError: the run did not begin: 1 of 3 nodes are missing: rank 2, never heard of")
    nodes.wait_nothing_left()


def test_many_ranks_that_never_come(make_nodes: MakeNodes) -> None:
    head = make_nodes(30, timeout_s=0.3).start(0)
    head.ends(91, "29 of 30 nodes are missing", "rank 8, never heard of; and 21 more, ranks 9-29")


def test_a_head_that_never_comes(make_nodes: MakeNodes) -> None:
    member = make_nodes(2, timeout_s=0.5).start(1)
    member.ends(91, "NotJoinedError: the head at 127.0.0.1:", "does not answer", "after 0.5 s: rank 0 is missing", "Look at")


def test_a_node_may_come_before_the_head(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=script("pass"))
    member = nodes.start(1)
    member.said("does not answer")
    head = nodes.start(0)
    head.ends(0)
    member.ends(0)
    assert len(member.lines("does not answer")) == 1, "told once, not at every attempt"


def test_news_is_a_line_for_each_change(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head = nodes.start(0)
    head.said("rank 1, never heard of; rank 2, never heard of")
    member = nodes.start(1)
    member.said("1 of 3 nodes are missing: rank 2, never heard of")
    head.signal(TERM)
    head.ends(143)
    member.ends(91)
    told = [line.partition(" (after")[0] for line in head.lines("are missing")]
    assert len(told) == len(set(told))
    assert told[-1] == "1 of 3 nodes are missing: rank 2, never heard of"
    assert len(told) <= 5
    assert set(member.lines("are missing")) <= set(told), "the others hear of it"


def test_devices_that_are_missing(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    member = nodes.start(1, num_devices=8, resources={"CPU": 2.0, "GPU": 6.0})
    member.said("does not answer")
    head = nodes.start(0, timeout_s=1.5)
    head.ends(91, "1 of 2 nodes are missing: rank 1 (", "127.0.0.1), 6 of 8 GPU")
    member.ends(91)


def test_another_token(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, command=script("pass"))
    head = nodes.start(0)
    stranger = nodes.start(1, secret="another")
    stranger.ends(92, "NodeRefusedError", f"127.0.0.1:{nodes.port} has another key", "--token-file, or HELMSMAN_TOKEN")
    assert "a process on 127.0.0.1 is not taken: it has another token" in head.output
    nodes.start(1).ends(0)
    head.ends(0)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"versions": {"python": "3.12.1", "ray": "2.60.0", "helmsman": "0.1.0"}},
            ("versions differ: python 3.12.1 there, 3.11.7 on the head", "Install the same on every node"),
        ),
        ({"versions": {}}, ("ray none there, 2.60.0 on the head",)),
        ({"count": 3}, ("it was told of 3 nodes, the head of 2",)),
        ({"rank": 2}, ("its rank is 2", "waits for ranks 1 to 1")),
    ],
    ids=["another Python", "of unknown versions", "another number of nodes", "no such rank"],
)
def test_a_node_that_does_not_fit(make_nodes: MakeNodes, changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    nodes = make_nodes(2, command=script("pass"))
    head = nodes.start(0)
    stranger = nodes.start(**{"rank": 1, **changes})
    stranger.ends(92, "NodeRefusedError: the head at 127.0.0.1:", "does not take this node", *facts)
    assert "is not taken" in head.output
    for fact in facts:
        assert fact in head.output
    nodes.start(1).ends(0)
    head.ends(0)


def test_two_nodes_of_one_rank(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, command=script("pass"))
    head, first = nodes.start(0), nodes.start(1)
    first.said("joined the cluster")
    nodes.start(1).ends(92, "NodeRefusedError", "rank 1 (", "is here already; every node needs a rank of its own")
    nodes.start(2).ends(0)
    head.ends(0)
    first.ends(0)


def test_a_node_that_leaves_before_the_run_began(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(4)
    head, leaving, staying = nodes.start(0), nodes.start(1), nodes.start(2)
    for member in (leaving, staying):
        member.said("joined the cluster")
    leaving.signal(TERM)
    leaving.ends(143, "this node was told to stop by SIGTERM; it leaves")
    head.ends(91, "NotJoinedError: rank 1 (", "left before the run began: this node was told to stop by SIGTERM")
    staying.ends(91, "NotJoinedError: the run did not begin: rank 1 (")
    nodes.wait_nothing_left()


def test_a_node_that_was_killed_may_come_again_before_the_run_begins(make_nodes: MakeNodes) -> None:
    """As a pod does; the run waits for it, whatever Ray still believes of the one before."""
    nodes = make_nodes(3, command=script("pass"))
    head, first = nodes.start(0), nodes.start(1)
    first.said("joined the cluster")
    first.signal(KILL)
    head.said("rank 1 (")
    head.said("was here and has gone")
    again, other = nodes.start(1), nodes.start(2)
    head.ends(0)
    again.ends(0)
    other.ends(0)


def test_a_first_connection_that_hangs(make_nodes: MakeNodes, make_cable: Callable[[int], Cable]) -> None:
    """The head does not know yet that it is lost, and the node that comes again is not taken for a second one."""
    nodes = make_nodes(2, command=script("pass"))
    nodes.behaviour(0, "waits")
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    member.said("knows this node")
    cable.desert()
    member.said("does not answer (the connection was closed)")
    nodes.behaviour(0, "")
    head.ends(0)
    member.ends(0)


# --- Ray ----------------------------------------------------------------------------------------------------------------


def test_ray_that_does_not_start_on_a_member(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    nodes.behaviour(1, "fails")
    head, other = nodes.start(0), nodes.start(2)
    other.said("joined the cluster")
    member = nodes.start(1)
    member.ends(
        93, "RayDiedError: Ray did not start on this node: ray start has ended with exit code 1", "no room for an object"
    )
    head.ends(91, "rank 1 (", "left before the run began: Ray did not start on this node", "no room for an object store")
    other.ends(91, "the run did not begin: rank 1 (")


def test_ray_that_does_not_start_on_the_head(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    nodes.behaviour(0, "waits", "fails")
    head, member = nodes.start_all()
    member.said("knows this node")
    nodes.behaviour(0, "")
    head.ends(93, "RayDiedError: Ray did not start on this node: ray start has ended with exit code 1", "no room for an object")
    member.ends(91, "NotJoinedError: the run did not begin: Ray did not start on this node")


def test_ray_that_never_says_that_it_is_up(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, ray_start_s=0.3)
    nodes.behaviour(0, "hangs")
    nodes.start(0).ends(93, "RayDiedError: Ray did not start on this node within 0.3 s")


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
    how = {"pid": "ray start has ended by SIGKILL", "raylet": "raylet has ended"}[which]
    member.ends(93, f"RayDiedError: Ray has died on this node: {how}")
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
    head.ends(93, "RayDiedError: Ray has died on the head: ")
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
    member.ends(91, "NotJoinedError: the run did not begin: this node was told to stop by SIGTERM")
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
    nodes = make_nodes(3, elastic=True, grace_s=60.0)
    head, leaving, staying = nodes.start_all()
    nodes.wait_running()
    leaving.signal(TERM)
    leaving.ends(143)
    head.said("leaves: this node was told to stop by SIGTERM")
    nodes.release()
    head.ends(0)
    staying.ends(0)
    assert not nodes.script_was_told(TERM)


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


def test_a_cut_connection_is_made_again(make_nodes: MakeNodes, make_cable: Callable[[int], Cable]) -> None:
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


def test_a_connection_that_only_the_member_knows_to_be_lost(make_nodes: MakeNodes, make_cable: Callable[[int], Cable]) -> None:
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


def test_a_head_that_cannot_be_reached(make_nodes: MakeNodes, make_cable: Callable[[int], Cable]) -> None:
    """What answers is a kernel that takes connections for a head that does nothing: nobody knows how the run ends."""
    nodes = make_nodes(2)
    cable = make_cable(nodes.port)
    head = nodes.start(0)
    member = nodes.start(1, control_port=cable.port)
    nodes.wait_running()
    cable.cut_and_swallow()
    member.ends(94, "HeadLostError: the head at 127.0.0.1:", "cannot be reached", "whether the run goes on there is not known")
    head.said("is lost: the connection was closed; the run goes on without it")
    nodes.release()
    head.ends(0)


def test_a_head_that_is_killed(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, *members = nodes.start_all()
    nodes.wait_running()
    head.signal(KILL)
    assert head.wait() == -KILL
    for member in members:
        member.ends(0, "the run has ended: its head is gone; this node has left")
    nodes.wait_nothing_left()


@pytest.mark.parametrize("secret", ["a token of this test", "another"])
def test_another_runs_head_has_the_port(make_nodes: MakeNodes, make_cable: Callable[[int], Cable], secret: str) -> None:
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
