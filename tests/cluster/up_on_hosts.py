"""Start ``helmsman up`` on hosts with namespaces of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Command, Hosts, why_not_here
from tests.contract.helpers import wait_until

PROGRAM = (sys.executable, str(Path(__file__).with_name("program.py")))

GONE_S = 10.0
ON_HOSTS = [
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here()),
    pytest.mark.timeout(300),
]
"""Marks of tests that need hosts."""

MakeHosts = Callable[[int], Hosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Hosts:
            hosts = Hosts(count)
            stack.callback(hosts.close)
            return hosts

        yield make


def start_up(hosts: Hosts, rank: int, what: str, *arguments: str) -> Command:
    """Start ``helmsman up`` with a script of program.py on a host, in SkyPilot's environment."""
    addresses = " ".join(host.name for host in hosts.all)
    environ = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(len(hosts.all)),
        "SKYPILOT_NODE_IPS": addresses,
        "HELMSMAN_TOKEN": "a token of this test",
    }
    return hosts[rank].up("--timeout=90", *arguments, "--", *PROGRAM, what, env=environ)


def show_settings(hosts: Hosts, rank: int, *arguments: str) -> Command:
    """Print the settings of one of two nodes, and start nothing."""
    return hosts[rank].up(f"--node-rank={rank}", "--num-nodes=2", "--show-settings", *arguments)


def wait_nothing_left(hosts: Hosts) -> None:
    wait_until(
        lambda: not any(host.left() for host in hosts.all),
        f"nothing is left: {[host.left() for host in hosts.all]}",
        GONE_S,
    )
