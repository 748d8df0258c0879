"""``helmsman up`` on hosts with spaces of their own: it comes up, says why it does not, and goes
without a trace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.helpers import wait_until
from tests.controller.bootstrap.hosts import Command, Hosts, why_not_here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here()),
    pytest.mark.timeout(300),
]

PROGRAM = (sys.executable, str(Path(__file__).with_name("program.py")))
_GONE_S = 10.0
Make = Callable[[int], Hosts]


@pytest.fixture
def make_hosts() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Hosts:
            hosts = Hosts(count)
            stack.callback(hosts.close)
            return hosts

        yield make


def _up(hosts: Hosts, rank: int, what: str, *arguments: str) -> Command:
    """``helmsman up`` with a script of program.py, as SkyPilot would start it on a host."""
    addresses = " ".join(host.name for host in hosts.all)
    environ = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(len(hosts.all)),
        "SKYPILOT_NODE_IPS": addresses,
        "HELMSMAN_TOKEN": "a token of this test",
    }
    return hosts[rank].up("--timeout=90", *arguments, "--", *PROGRAM, what, env=environ)


def _show(hosts: Hosts, rank: int, *arguments: str) -> Command:
    """The settings of one of two nodes, for which nothing is started."""
    return hosts[rank].up(f"--node-rank={rank}", "--num-nodes=2", "--show-settings", *arguments)


def _nothing_left(hosts: Hosts) -> None:
    wait_until(
        lambda: not any(host.left() for host in hosts.all),
        f"nothing is left: {[host.left() for host in hosts.all]}",
        _GONE_S,
    )


def test_up_nodes_return_and_leave(make_hosts: Make) -> None:
    """A node that is killed and comes again, as a pod does, one whose raylet dies, and one whose
    head is killed.

    Ray learns late of the first end, here after seconds instead of half a minute, and the script
    would send work to it.
    """
    hosts = make_hosts(3)
    head, first = (
        _up(hosts, 0, "busy", "--env=RAY_health_check_period_ms=1000"),
        _up(hosts, 1, "busy"),
    )
    first.said("joined the cluster")
    first.signal(signal.SIGSTOP)  # so that it does not report the end of its raylet
    # which, ended in order, would take leave of Ray's head
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)
    first.signal(signal.SIGKILL)
    head.said("connection lost")
    again, other = _up(hosts, 1, "busy"), _up(hosts, 2, "busy")
    head.said("busy on 3 nodes")
    assert "3 nodes with" in head.output
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)
    again.ends(93, "raylet has ended", limit_s=3.0)
    head.said("rank 1 (host1 10.77.0.2) leaves: Ray has died on this node: raylet has ended")
    assert not head.has_ended
    head.signal(signal.SIGKILL)
    other.ends(0, "its head has exited", limit_s=5.0)
    assert head.wait(_GONE_S) == 137
    wait_until(lambda: not hosts[0].processes(), "no process is left on the head", _GONE_S)
    hosts[0].up("--show-settings").ends(0)  # which removes the folder of the run that was killed
    _nothing_left(hosts)


def test_up_with_a_cut_cable(make_hosts: Make) -> None:
    """A call is lost by the keepalive times; with Ray's own it takes more than a minute."""
    hosts = make_hosts(2)
    head, cut = (_up(hosts, rank, "loses") for rank in range(2))
    head.said("the call is made")
    hosts.cut(1)
    head.said("the call is lost", limit_s=40.0)
    cut.ends(94, "the head at host0:6380 cannot be reached", limit_s=30.0)
    wait_until(lambda: not hosts[1].left(), "nothing is left on the host that left", _GONE_S)
    head.said("rank 1 (host1 10.77.0.2) is lost")
    head.signal(signal.SIGTERM)
    head.ends(143, limit_s=_GONE_S)
    _nothing_left(hosts)


def test_up_elastic_drains_a_stopped_node(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    head, leaving = (
        _up(hosts, rank, "moves", "--resources", '{"GPU": 4}', "--elastic", "--grace", "60")
        for rank in range(2)
    )
    head.said("generating on 2 nodes")
    leaving.signal(signal.SIGTERM)
    head.ends(0, "received SIGTERM", "8 results are whole", limit_s=60.0)
    leaving.ends(143, limit_s=60.0)
    assert "generated again" not in head.output
    _nothing_left(hosts)


def test_up_two_runs_share_a_host_beside_a_stale_session(make_hosts: Make) -> None:
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
    _nothing_left(hosts)


# --- before Ray starts ----------------------------------------------------------------------------


def test_up_stopped_during_a_name_lookup(make_hosts: Make) -> None:
    """Also while no name server answers, which takes longer than a node may take to end."""
    hosts = make_hosts(2)
    servers = hosts[1].folder / "resolv.conf"
    servers.write_text("nameserver 10.77.0.77\noptions timeout:30\n")
    hosts[1].do("mount", "--bind", str(servers), "/etc/resolv.conf")
    # an address without a host
    hosts[1].do("ip", "neigh", "add", "10.77.0.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")
    arguments = ("--node-rank=1", "--num-nodes=2", "--head=head.example", "--interface=eth0")
    command = hosts[1].up(*arguments, "--", "true")
    asked = Path(f"/proc/{hosts[1].pid}/net/udp")
    wait_until(
        lambda: ":0035 " in asked.read_text() or command.has_ended, "the name server is asked", 30
    )
    command.signal(signal.SIGTERM)
    command.ends(143, "received SIGTERM; it leaves", limit_s=_GONE_S)
    assert "Traceback" not in command.output
    _nothing_left(hosts)


def test_up_names_the_address_of_a_host(make_hosts: Make) -> None:
    """A head is where its name says, and not on its route to the world, where no node seeks it."""
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "add", f"10.78.0.{index + 1}/24", "dev", "eth0")
    for rank in range(2):
        _show(hosts, rank, "--head=10.78.0.1").ends(0, f"address 10.78.0.{rank + 1}")
    for host in hosts.all:
        host.do("ip", "route", "del", "default")
    hosts[1].do("ip", "link", "set", "eth0", "down")
    _show(hosts, 0).ends(90, "no route", "eth0 10.77.0.1", "--interface")
    _show(hosts, 1, "--head=10.77.0.1").ends(90, "no route to the head 10.77.0.1")
    _show(hosts, 0, "--interface=eth0").ends(0, "address 10.77.0.1")
    _show(hosts, 0, "--interface=lo").ends(90, "127.0.0.1, which no other host can reach")


def test_up_without_ipv4(make_hosts: Make) -> None:
    """One node alone needs no address."""
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "flush", "dev", "eth0")
        host.do("ip", "-6", "addr", "add", f"fd00::{index + 1}/64", "dev", "eth0", "nodad")
        host.do("ip", "-6", "route", "add", "default", "via", "fd00::99")
    for rank in range(2):
        facts = (f"fd00::{rank + 1}, and nodes meet by IPv4 alone", "--interface")
        _show(hosts, rank, "--head=fd00::1").ends(90, *facts)
    hosts[0].up("--show-settings").ends(0, "address 127.0.0.1")
