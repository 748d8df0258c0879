"""Leases of ports: nobody gets one twice, they are held until their owner binds them, and they end with their holder."""

from __future__ import annotations

import asyncio
import http.server
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from helmsman.rpc_server import ports
from helmsman.rpc_server.ports import FIRST_PORT, RANGE_VARIABLE, PortLeases, hand_over, port_range

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="leases are sockets of Linux's abstract namespace")
TAKE_PLAINLY = "import socket, sys; s = socket.socket(); s.bind(('0.0.0.0', int(sys.argv[1]))); s.listen(); print('bound')"


@pytest.fixture
def leases() -> Iterator[PortLeases]:
    made = PortLeases()
    yield made
    made.close()


@pytest.fixture
def port(leases: PortLeases) -> int:
    return leases.lease(1)[0]


def bind_elsewhere(port: int) -> bool:
    """Whether a program that knows nothing of us can bind the port; its number is hidden from our hooks."""
    source = "import os; port = os.getpid() * 0 + " + " + ".join(["1000"] * (port // 1000)) + f" + {port % 1000}\n"
    source += "import socket; s = socket.socket(); s.bind(('0.0.0.0', port)); s.listen()"
    return subprocess.run([sys.executable, "-c", source], stderr=subprocess.DEVNULL, check=False).returncode == 0


def can_connect(port: int, address: str = "127.0.0.1") -> bool:
    with socket.create_connection((address, port), timeout=10.0):
        return True


def test_leases_are_apart_and_below_the_ephemeral_range(leases: PortLeases) -> None:
    other = PortLeases()
    leased = leases.lease(50) + other.lease(50)
    assert len(set(leased)) == 100
    first, last = port_range({})
    assert first == FIRST_PORT
    assert all(first <= port <= last for port in leased)
    other.close()
    other.close()


def test_a_port_that_somebody_has_bound_is_not_leased(leases: PortLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = leases.lease(1)
    leases.close()
    monkeypatch.setenv(RANGE_VARIABLE, f"{port}-{port}")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match=rf"only 0 of 1 .* {port}-{port} .* leased 0, other programs have bound 1 "):
            leases.lease(1)
    assert leases.lease(1) == [port]


@LINUX
def test_too_few_says_who_has_them_and_leases_none(leases: PortLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, "20100-20109")
    other = PortLeases()
    theirs = other.lease(4)
    with pytest.raises(OSError, match=rf"only 6 of 7 ports are free: .* leased 4, .* bound 0 .*{RANGE_VARIABLE}"):
        leases.lease(7)
    assert not leases._held
    assert sorted(leases.lease(6) + theirs) == list(range(20100, 20110))
    other.close()


@pytest.mark.parametrize("value", ["20000", "20000-", "30000-20000", "80-90", "20000-70000", "a-b"])
def test_a_range_that_is_none_is_refused_in_a_line(value: str) -> None:
    with pytest.raises(ValueError, match=r"HELMSMAN_PORT_RANGE is .*expected 'FIRST-LAST'"):
        port_range({RANGE_VARIABLE: value})


def test_a_range_may_be_given() -> None:
    assert port_range({RANGE_VARIABLE: " 20000 - 20200 "}) == (20_000, 20_200)


# --- held until bound ---------------------------------------------------------------------------------------------------


def test_nobody_else_can_bind_a_leased_port(port: int) -> None:
    assert not bind_elsewhere(port)
    hand_over(port)
    assert bind_elsewhere(port)


def plainly(port: int) -> None:
    with socket.socket() as owner:
        owner.bind(("0.0.0.0", port))
        owner.listen()
        assert can_connect(port)


def with_reuse_address(port: int) -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        with socket.socket(family) as owner:
            owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            owner.bind((address, port))
            owner.listen()
            assert can_connect(port)


def with_reuse_port(port: int) -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("0.0.0.0", port))
        owner.listen()
        assert can_connect(port)


def with_http_server(port: int) -> None:
    with http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler):
        assert can_connect(port)


def with_asyncio(port: int) -> None:
    async def serve() -> None:
        async with await asyncio.start_server(lambda reader, writer: writer.close(), None, port):
            assert await asyncio.to_thread(can_connect, port)

    asyncio.run(serve())


def with_the_store_of_torch(port: int) -> None:
    store = pytest.importorskip("torch.distributed").TCPStore("127.0.0.1", port, 1, True)
    store.set("key", "value")
    assert store.get("key") == b"value"


OWNERS = [plainly, with_reuse_address, with_reuse_port, with_http_server, with_asyncio, with_the_store_of_torch]


@pytest.mark.parametrize("own", OWNERS, ids=lambda own: own.__name__)
def test_the_owner_binds_it_in_any_way(port: int, own: Callable[[int], None]) -> None:
    own(port)


def test_an_owner_that_reuses_the_address_leaves_the_hold_for_when_it_has_gone(port: int) -> None:
    with_reuse_address(port)
    assert not bind_elsewhere(port)


@pytest.mark.parametrize("start", ["argument", "joined", "environment", "posix_spawn"])
def test_a_program_that_is_told_the_port_can_bind_it(port: int, start: str) -> None:
    source, number = "import sys; sys.argv[1:] = [''.join(c for c in sys.argv[-1] if c.isdigit())]; " + TAKE_PLAINLY, str(port)
    if start == "posix_spawn":
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", source, number], os.environ)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    if start == "environment":
        source, environ, last = TAKE_PLAINLY.replace("sys.argv[1]", "__import__('os').environ['PORTS']"), {"PORTS": number}, []
    else:
        environ, last = {}, [f"--port={number}" if start == "joined" else number]
    subprocess.run([sys.executable, "-c", source, *last], env={**os.environ, **environ}, check=True)


def test_a_program_that_only_inherits_the_number_takes_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(port))
    subprocess.run([sys.executable, "-c", "pass"], env=dict(os.environ), check=True)
    assert not bind_elsewhere(port)


# --- the end of a lease -------------------------------------------------------------------------------------------------

HOLDER = """
import os, sys
from helmsman.rpc_server.ports import PortLeases
leases = PortLeases()
print(*leases.lease(3), flush=True)
if sys.argv[1] == "forks" and os.fork() == 0:
    print("forked", flush=True)
input()
"""


@LINUX
@pytest.mark.parametrize("fork", ["alone", "forks"])
def test_a_lease_ends_with_its_process_also_when_a_forked_child_lives_on(
    leases: PortLeases, monkeypatch: pytest.MonkeyPatch, fork: str
) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, "20120-20122")
    command = [sys.executable, "-c", HOLDER, fork]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert sorted(map(int, holder.stdout.readline().split())) == [20120, 20121, 20122]
        if fork == "forks":
            assert holder.stdout.readline() == "forked\n"
        with pytest.raises(OSError, match=r"only 0 of 1 .* leased 3, .* bound 0 "):
            leases.lease(1)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert sorted(leases.lease(3)) == [20120, 20121, 20122]


def _bind_reusing(port: int, done: multiprocessing.connection.Connection) -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.bind(("0.0.0.0", port))
        owner.listen()
        done.send(not ports._holds)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_child_can_bind_while_its_parent_holds(port: int) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_bind_reusing, args=(port, theirs))
    child.start()
    assert ours.poll(30.0)
    assert ours.recv() is True
    child.join()
    assert not bind_elsewhere(port), "the parent's hold has not gone with the child's"
