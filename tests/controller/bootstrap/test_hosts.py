"""``helmsman up`` on hosts with spaces of their own: it comes up, says why it does not, and goes without a trace."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.helpers import wait_until
from tests.controller.bootstrap.hosts import Command, Hosts, up_all, why_not_here

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here()), pytest.mark.timeout(150)]

PROGRAM = str(Path(__file__).with_name("program.py"))
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


def _script(*arguments: str) -> list[str]:
    return [sys.executable, PROGRAM, *arguments]


def _codes(commands: list[Command], limit_s: float) -> list[int]:
    """Exit codes; all within the limit together."""
    until = time.monotonic() + limit_s
    return [command.wait(max(0.1, until - time.monotonic())) for command in commands]


def _nothing_left(hosts: Hosts) -> None:
    wait_until(
        lambda: not any(host.left() for host in hosts.all), f"nothing is left: {[host.left() for host in hosts.all]}", _GONE_S
    )


@pytest.mark.parametrize("code", [0, 7])
def test_three_hosts_run_a_script_and_its_exit_code_comes_back(make_hosts: Make, code: int) -> None:
    hosts = make_hosts(3)
    commands = up_all(hosts, _script("count", str(code)), "--resources", '{"GPU": 4}')
    assert _codes(commands, 60) == [code, 0, 0]
    assert "sees 3 nodes of ranks ['0', '1', '2'] with {'GPU': 12}" in commands[0].output
    assert "3 nodes with" in commands[0].output
    for command in commands[1:]:
        assert f"the run has ended: the script has ended with exit code {code}" in command.output
    assert "is lost" not in commands[0].output
    _nothing_left(hosts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_node_ends_the_run_everywhere_also_with_busy_actors(make_hosts: Make, rank: int, number: int) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("busy"))
    commands[0].said("busy on 2 nodes")
    commands[rank].signal(number)
    codes = _codes(commands, _GONE_S)
    assert codes[0] == 128 + number
    assert codes[1] == (128 + number if rank == 1 else 0)
    name = signal.Signals(number).name
    assert f"told to stop by {name}" in commands[0].output
    _nothing_left(hosts)


def test_a_node_of_an_elastic_run_that_is_told_to_stop_is_left_with_its_requests(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("moves"), "--resources", '{"GPU": 4}', "--elastic", "--grace", "60")
    commands[0].said("generating on 2 nodes")
    commands[1].signal(signal.SIGTERM)
    assert _codes(commands, 60) == [0, 143]
    assert "told to stop by SIGTERM" in commands[0].output
    assert "8 results are whole" in commands[0].output
    assert "generated again" not in commands[0].output
    _nothing_left(hosts)


def test_a_script_that_is_deaf_is_killed(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("stubborn"), "--grace", "1")
    commands[0].said("deaf")
    commands[0].signal(signal.SIGTERM)
    assert _codes(commands, _GONE_S) == [143, 0]
    _nothing_left(hosts)


@pytest.mark.parametrize("who", ["supervisor", "gcs_server"])
def test_the_heads_end_ends_all_nodes_within_five_seconds(make_hosts: Make, who: str) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("busy"))
    commands[0].said("busy on 2 nodes")
    os.kill(commands[0].pid if who == "supervisor" else hosts[0].pid_of("gcs_server"), signal.SIGKILL)
    assert commands[1].wait(5.0) == 0
    assert commands[0].wait(_GONE_S) == (137 if who == "supervisor" else 93)
    reason = "its head is gone" if who == "supervisor" else "gcs_server has ended"
    assert reason in commands[1].output
    if who == "supervisor":
        wait_until(lambda: not hosts[0].processes(), "no process is left on the head", _GONE_S)
        assert hosts[0].up("--", "true").wait(30) == 0, "the next run there removes the folder of the one that was killed"
    _nothing_left(hosts)


def test_a_head_whose_cable_is_pulled_is_left_within_thirty_seconds(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("busy"))
    commands[0].said("busy on 2 nodes")
    hosts.cut(0)
    assert commands[1].wait(30.0) == 94
    assert "the head at 10.77.0.1:6380 cannot be reached" in commands[1].output
    wait_until(lambda: not hosts[1].left(), "nothing is left on the host that left", _GONE_S)
    commands[0].said("rank 1 (host1 10.77.0.2) is lost", 30.0)


def test_a_call_on_a_node_whose_cable_is_pulled_is_lost_soon(make_hosts: Make) -> None:
    """By the keepalive times; with Ray's own it takes more than a minute."""
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("loses"))
    commands[0].said("the call is made")
    hosts.cut(1)
    commands[0].said("the call is lost", 40.0)
    assert commands[0].wait(_GONE_S) == 0
    assert commands[1].wait(30.0) == 94


def test_a_node_whose_own_raylet_dies_leaves_within_three_seconds_and_the_run_goes_on(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("wait"))
    commands[0].said("waits")
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)
    assert commands[1].wait(3.0) == 93
    assert "raylet has ended" in commands[1].output
    commands[0].said("rank 1 (host1 10.77.0.2) leaves: Ray has died on this node: raylet has ended")
    assert not commands[0].has_ended
    commands[0].signal(signal.SIGTERM)
    assert commands[0].wait(_GONE_S) == 143
    _nothing_left(hosts)


def test_a_rank_that_never_comes_is_named_on_both_sides(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("wait"), "--num-nodes", "3", "--timeout", "15")
    assert _codes(commands, 60) == [91, 91]
    for command in commands:
        assert re.search(r"of 3 nodes are missing: .*rank 2, never heard of, after 15 s", command.output), command.output
        assert command.output.count("nodes are missing") <= 6, "a line for each change, not for each look"
    _nothing_left(hosts)


def test_a_node_that_was_killed_and_comes_again_is_there_once(make_hosts: Make) -> None:
    """As a pod does. Ray learns of the first one's end late, and the script would send work to it."""
    hosts = make_hosts(3)

    def up(rank: int) -> Command:
        place = (f"--node-rank={rank}", "--num-nodes=3", "--head=host0", "--timeout=90")
        return hosts[rank].up(*place, "--", *_script("count", "0"))

    head, first = up(0), up(1)
    first.said("joined the cluster")
    first.signal(signal.SIGSTOP)  # so that it does not tell of its raylet
    os.kill(hosts[1].pid_of("raylet"), signal.SIGKILL)  # which, ended in order, would take leave of Ray's head
    first.signal(signal.SIGKILL)
    head.said("was here and has gone")
    again, other = up(1), up(2)
    assert _codes([head, again, other], 100) == [0, 0, 0]
    assert "Ray still counts the one that was killed before it" in head.output
    assert "sees 3 nodes of ranks ['0', '1', '2']" in head.output
    _nothing_left(hosts)


def test_a_head_that_never_comes_is_named(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    command = hosts[1].up("--node-rank=1", "--num-nodes=2", "--head=host0", "--timeout=3", "--", *_script("wait"))
    assert command.wait(60) == 91
    assert "the head at host0:6380 does not answer" in command.output
    assert "rank 0 is missing" in command.output
    _nothing_left(hosts)


def test_a_node_that_looks_its_heads_name_up_can_be_told_to_stop(make_hosts: Make) -> None:
    """Also while no name server answers, which takes longer than a node may take to end."""
    hosts = make_hosts(2)
    servers = hosts[1].folder / "resolv.conf"
    servers.write_text("nameserver 10.77.0.77\noptions timeout:30\n")
    hosts[1].do("mount", "--bind", str(servers), "/etc/resolv.conf")
    hosts[1].do("ip", "neigh", "add", "10.77.0.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")  # where nobody is
    arguments = ("--node-rank=1", "--num-nodes=2", "--head=head.example", "--interface=eth0")
    command = hosts[1].up(*arguments, "--", *_script("wait"))
    asked = Path(f"/proc/{hosts[1].pid}/net/udp")
    wait_until(lambda: ":0035 " in asked.read_text() or command.has_ended, "the name server is asked", 30)
    command.signal(signal.SIGTERM)
    assert command.wait(_GONE_S) == 143
    assert "told to stop by SIGTERM; it leaves" in command.output
    assert "Traceback" not in command.output
    _nothing_left(hosts)


def test_a_host_without_a_route_says_so(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    for host in hosts.all:
        host.do("ip", "route", "del", "default")
    hosts[1].do("ip", "link", "set", "eth0", "down")
    head = hosts[0].up("--node-rank=0", "--num-nodes=2", "--", *_script("wait"))
    assert head.wait(60) == 90
    for fact in ("no route", "eth0 10.77.0.1", "--interface"):
        assert fact in head.output
    other = hosts[1].up("--node-rank=1", "--num-nodes=2", "--head=10.77.0.1", "--", *_script("wait"))
    assert other.wait(60) == 90
    assert "no route to the head 10.77.0.1" in other.output
    named = hosts[0].up("--node-rank=0", "--num-nodes=2", "--interface=eth0", "--timeout=3", "--", *_script("wait"))
    assert named.wait(60) == 91, "with an interface it goes on, and waits for the other"
    loopback = hosts[0].up("--node-rank=0", "--num-nodes=2", "--interface=lo", "--", *_script("wait"))
    assert loopback.wait(60) == 90
    assert "127.0.0.1, which no other host can reach" in loopback.output
    _nothing_left(hosts)


def test_a_head_is_where_its_name_says(make_hosts: Make) -> None:
    """And not on its route to the world, where nobody seeks it."""
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "add", f"10.78.0.{index + 1}/24", "dev", "eth0")
    commands = [
        host.up(f"--node-rank={rank}", "--num-nodes=2", "--head=10.78.0.1", "--timeout=30", "--", *_script("count", "0"))
        for rank, host in enumerate(hosts.all)
    ]
    assert _codes(commands, 60) == [0, 0]
    assert "at 10.78.0.1:6379" in commands[0].output
    _nothing_left(hosts)


def test_hosts_without_ipv4_say_so_and_one_alone_needs_none(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    for index, host in enumerate(hosts.all):
        host.do("ip", "addr", "flush", "dev", "eth0")
        host.do("ip", "-6", "addr", "add", f"fd00::{index + 1}/64", "dev", "eth0", "nodad")
        host.do("ip", "-6", "route", "add", "default", "via", "fd00::99")
    for rank, host in enumerate(hosts.all):
        command = host.up(f"--node-rank={rank}", "--num-nodes=2", "--head=fd00::1", "--", *_script("wait"))
        assert command.wait(60) == 90
        for fact in (f"fd00::{rank + 1}, and nodes meet by IPv4 alone", "--interface"):
            assert fact in command.output
    alone = hosts[0].up("--", *_script("count", "3"))
    assert alone.wait(60) == 3
    assert "sees 1 nodes" in alone.output
    _nothing_left(hosts)


def test_a_node_with_another_token_is_not_taken(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    head = hosts[0].up("--node-rank=0", "--num-nodes=2", "--timeout=30", "--", *_script("wait"), env={"HELMSMAN_TOKEN": "one"})
    head.said("rank 1, never heard of")
    other = hosts[1].up(
        "--node-rank=1", "--num-nodes=2", "--head=host0", "--", *_script("wait"), env={"HELMSMAN_TOKEN": "another"}
    )
    assert other.wait(60) == 92
    assert "has another key" in other.output
    assert "--token-file" in other.output
    head.said("a process on 10.77.0.2 is not taken: it has another token")
    head.signal(signal.SIGTERM)
    assert head.wait(_GONE_S) == 143
    _nothing_left(hosts)


@pytest.mark.parametrize(("package", "version"), [("ray", "2.59.0"), ("helmsman", "0.0.1")])
def test_a_node_with_other_versions_is_not_taken(make_hosts: Make, tmp_path: Path, package: str, version: str) -> None:
    installed = tmp_path / f"{package}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    if package == "helmsman":  # whose version is in its source
        (tmp_path / "sitecustomize.py").write_text(f"import helmsman.api.version as it; it.__version__ = {version!r}\n")
    hosts = make_hosts(2)
    head = hosts[0].up("--node-rank=0", "--num-nodes=2", "--timeout=30", "--", *_script("wait"))
    head.said("rank 1, never heard of")
    repository = Path(__file__).resolve().parents[3]
    other = hosts[1].up(
        "--node-rank=1", "--num-nodes=2", "--head=host0", "--", *_script("wait"), env={"PYTHONPATH": f"{tmp_path}:{repository}"}
    )
    assert other.wait(60) == 92
    assert f"versions differ: {package} {version} there, " in other.output
    head.said(f"rank 1 (host1 10.77.0.2) is not taken: versions differ: {package} {version} there")
    head.signal(signal.SIGINT)
    assert head.wait(_GONE_S) == 130
    _nothing_left(hosts)


def test_ports_that_are_held_say_by_whom(make_hosts: Make) -> None:
    hosts = make_hosts(1)
    holder = hosts[0].start(sys.executable, "-u", "-m", "http.server", "6379")
    holder.said("Serving")
    head = ("--node-rank=0", "--num-nodes=2", "--head=host0")
    refused = hosts[0].up(*head, "--", *_script("wait"))
    assert refused.wait(60) == 90
    for fact in ("port 6379", "a foreign program", "http.server 6379", "--port"):
        assert fact in refused.output
    holder.signal(signal.SIGTERM)
    holder.wait(60)
    first = hosts[0].up(*head, "--timeout=60", "--", *_script("wait"))
    first.said("rank 1, never heard of")
    second = hosts[0].up(*head, "--", *_script("wait"))
    assert second.wait(60) == 90
    for fact in ("port 6379", "another Ray cluster", "gcs_server", "--port"):
        assert fact in second.output
    third = hosts[0].up(*head, "--port=7000", "--control-port=6380", "--", *_script("wait"))
    assert third.wait(60) == 90
    for fact in ("port 6380", "another run of helmsman up", "--control-port"):
        assert fact in third.output
    first.signal(signal.SIGTERM)
    assert first.wait(_GONE_S) == 143
    _nothing_left(hosts)


def test_two_runs_of_one_node_share_a_host_beside_a_stale_session(make_hosts: Make) -> None:
    hosts = make_hosts(1)
    stale = hosts[0].folder / "ray"
    stale.mkdir()
    (stale / "ray_current_cluster").write_text("10.77.0.9:6379")
    runs = [hosts[0].up("--", *_script("count", str(code)), env={"RAY_TMPDIR": str(hosts[0].folder)}) for code in (3, 4)]
    assert _codes(runs, 60) == [3, 4]
    for run in runs:
        assert "sees 1 nodes of ranks ['0']" in run.output
    _nothing_left(hosts)


def test_a_restarted_head_is_not_taken_for_the_one_before(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    commands = up_all(hosts, _script("wait"))
    commands[0].said("waits")
    with commands[1].frozen():
        os.kill(commands[0].pid, signal.SIGKILL)
        commands[0].wait(60)
        wait_until(lambda: not hosts[0].processes(), "the first head is gone", _GONE_S)
        env = {"HELMSMAN_TOKEN": "a token of this test"}
        again = hosts[0].up("--node-rank=0", "--num-nodes=2", "--head=host0", "--timeout=60", "--", *_script("wait"), env=env)
        again.said("rank 1, never heard of")
    assert commands[1].wait(_GONE_S) == 0
    assert "its head is gone" in commands[1].output
    again.signal(signal.SIGTERM)
    assert again.wait(_GONE_S) == 143
    _nothing_left(hosts)
