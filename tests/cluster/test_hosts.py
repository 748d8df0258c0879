"""Tests of ``helmsman up`` on hosts with namespaces of their own."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cluster.up_on_hosts import (
    GONE_S,
    ON_HOSTS,
    MakeHosts,
    make_hosts,
    show_settings,
    start_up,
    wait_nothing_left,
)
from tests.contract.helpers import wait_until

__all__ = ["make_hosts"]

pytestmark = ON_HOSTS


def test_up_elastic_drains_a_stopped_node(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    head, leaving = (
        start_up(hosts, rank, "moves", "--resources", '{"GPU": 4}', "--elastic", "--grace", "60")
        for rank in range(2)
    )
    head.said("generating on 2 nodes")
    leaving.signal(signal.SIGTERM)
    head.ends(0, "received SIGTERM", "8 results are whole", limit_s=60.0)
    leaving.ends(143, limit_s=60.0)
    assert "generated again" not in head.output
    wait_nothing_left(hosts)


# --- before Ray starts ----------------------------------------------------------------------------


def test_up_stopped_during_a_name_lookup(make_hosts: MakeHosts) -> None:
    """The lookup takes longer than a node may take to end."""
    hosts = make_hosts(2)
    servers = hosts[1].folder / "resolv.conf"
    servers.write_text("nameserver 10.77.0.77\noptions timeout:30\n")
    hosts[1].do("mount", "--bind", str(servers), "/etc/resolv.conf")
    # no host has this address
    hosts[1].do("ip", "neigh", "add", "10.77.0.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")
    arguments = ("--node-rank=1", "--num-nodes=2", "--head=head.example", "--interface=eth0")
    command = hosts[1].up(*arguments, "--", "true")
    asked = Path(f"/proc/{hosts[1].pid}/net/udp")
    wait_until(
        lambda: ":0035 " in asked.read_text() or command.has_ended, "the name server is asked", 30
    )
    command.signal(signal.SIGTERM)
    command.ends(143, "received SIGTERM; it leaves", limit_s=GONE_S)
    assert "Traceback" not in command.output
    wait_nothing_left(hosts)


def test_up_names_the_address_of_a_host(make_hosts: MakeHosts) -> None:
    """The address of a head is that of its name, not that of its default route."""
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "add", f"10.78.0.{index + 1}/24", "dev", "eth0")
    for rank in range(2):
        show_settings(hosts, rank, "--head=10.78.0.1").ends(0, f"address 10.78.0.{rank + 1}")
    for host in hosts.all:
        host.do("ip", "route", "del", "default")
    hosts[1].do("ip", "link", "set", "eth0", "down")
    show_settings(hosts, 0).ends(90, "no route", "eth0 10.77.0.1", "--interface")
    show_settings(hosts, 1, "--head=10.77.0.1").ends(90, "no route to the head 10.77.0.1")
    show_settings(hosts, 0, "--interface=eth0").ends(0, "address 10.77.0.1")
    show_settings(hosts, 0, "--interface=lo").ends(90, "127.0.0.1, which no other host can reach")


def test_up_without_ipv4(make_hosts: MakeHosts) -> None:
    """One node alone needs no address."""
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "flush", "dev", "eth0")
        host.do("ip", "-6", "addr", "add", f"fd00::{index + 1}/64", "dev", "eth0", "nodad")
        host.do("ip", "-6", "route", "add", "default", "via", "fd00::99")
    for rank in range(2):
        facts = (f"fd00::{rank + 1}, and nodes meet by IPv4 alone", "--interface")
        show_settings(hosts, rank, "--head=fd00::1").ends(90, *facts)
    hosts[0].up("--show-settings").ends(0, "address 127.0.0.1")
