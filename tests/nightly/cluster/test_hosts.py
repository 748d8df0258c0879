"""Tests of runs on several hosts with killed nodes, a cut cable or a stale session."""

from __future__ import annotations

import os
import signal

from tests.cluster.up_on_hosts import (
    GONE_S,
    ON_HOSTS,
    PROGRAM,
    MakeHosts,
    make_hosts,
    start_up,
    wait_nothing_left,
)
from tests.contract.helpers import wait_until

__all__ = ["make_hosts"]
pytestmark = ON_HOSTS


def test_up_nodes_return_and_leave(make_hosts: MakeHosts) -> None:
    """A killed node returns, the raylet of a node dies, and the head is killed.

    Ray detects the first end late, here after seconds, and until then the script would send work to
    that node.
    """
    hosts = make_hosts(3)
    head = start_up(hosts, 0, "busy", "--env=RAY_health_check_period_ms=1000")
    first = start_up(hosts, 1, "busy")
    first.said("joined the cluster")
    first.signal(signal.SIGSTOP)  # does not report the end of its raylet
    # A raylet that ends in order would leave Ray's head.
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)
    first.signal(signal.SIGKILL)
    head.said("connection lost")
    again, other = start_up(hosts, 1, "busy"), start_up(hosts, 2, "busy")
    head.said("busy on 3 nodes")
    assert "3 nodes with" in head.output
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)
    again.ends(93, "raylet has ended", limit_s=3.0)
    head.said("rank 1 (host1 10.77.0.2) leaves: Ray has died on this node: raylet has ended")
    assert not head.has_ended
    head.signal(signal.SIGKILL)
    other.ends(94, "the head at host0:6380 is lost", limit_s=5.0)
    assert head.wait(GONE_S) == 137
    wait_until(lambda: not hosts[0].processes(), "no process is left on the head", GONE_S)
    hosts[0].up("--show-settings").ends(0)  # removes the folder of the killed run
    wait_nothing_left(hosts)


def test_up_with_a_cut_cable(make_hosts: MakeHosts) -> None:
    """The keepalive times end a call; with those of Ray it takes more than a minute."""
    hosts = make_hosts(2)
    head, cut = (start_up(hosts, rank, "loses") for rank in range(2))
    head.said("the call is made")
    hosts.cut(1)
    head.said("the call is lost", limit_s=40.0)
    cut.ends(94, "the head at host0:6380 is lost", limit_s=30.0)
    wait_until(lambda: not hosts[1].left(), "nothing is left on the host that left", GONE_S)
    head.said("rank 1 (host1 10.77.0.2) is lost")
    head.signal(signal.SIGTERM)
    head.ends(143, limit_s=GONE_S)
    wait_nothing_left(hosts)


def test_up_two_runs_share_a_host_beside_a_stale_session(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(1)
    stale = hosts[0].folder / "ray"
    stale.mkdir()
    (stale / "ray_current_cluster").write_text("10.77.0.9:6379")
    runs = [
        hosts[0].up("--", *PROGRAM, "count", str(code), env={"RAY_TMPDIR": str(hosts[0].folder)})
        for code in (3, 4)
    ]
    for run, code in zip(runs, (3, 4), strict=True):
        run.ends(code, "sees 1 nodes of ranks ['0']", limit_s=60.0)
    wait_nothing_left(hosts)
