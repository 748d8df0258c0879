"""Test that each port is leased once, can be bound by its owner, and is freed with its process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helmsman._process.ports import FIRST_PORT, RANGE_VARIABLE, PortLeases, port_range
from tests.own_ports import own_ports

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="leases are sockets of Linux's abstract namespace"
)
BIND_WITHOUT_LEASE = (
    "import socket, sys; s = socket.socket(); s.bind(('0.0.0.0', int(sys.argv[1]))); "
    "s.listen(); print('bound')"
)


@pytest.fixture
def leases() -> Iterator[PortLeases]:
    made = PortLeases()
    yield made
    made.close()


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The only ports that may be leased."""
    with own_ports() as ports:
        monkeypatch.setenv(RANGE_VARIABLE, f"{ports[0]}-{ports[9]}")
        yield list(ports[:10])


@pytest.fixture
def port(leases: PortLeases) -> int:
    return leases.lease(1)[0]


def test_lease_distinct_ports_of_range(leases: PortLeases) -> None:
    other = PortLeases()
    leased = leases.lease(50) + other.lease(50)
    assert len(set(leased)) == 100
    first, last = port_range({})
    assert first == FIRST_PORT
    assert all(first <= port <= last for port in leased)
    other.close()
    other.close()


def test_lease_skips_bound_port(leases: PortLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = leases.lease(1)
    leases.close()
    monkeypatch.setenv(RANGE_VARIABLE, f"{port}-{port}")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        with pytest.raises(
            OSError,
            match=rf"only 0 of 1 .* {port}-{port} .* leased 0, other programs have bound 1 ",
        ):
            leases.lease(1)
    assert leases.lease(1) == [port]


@LINUX
def test_lease_too_few_free(leases: PortLeases, ten: list[int]) -> None:
    other = PortLeases()
    theirs = other.lease(4)
    with pytest.raises(
        OSError, match=rf"only 6 of 7 ports are free: .* leased 4, .* bound 0 .*{RANGE_VARIABLE}"
    ):
        leases.lease(7)
    assert not leases._held
    assert sorted(leases.lease(6) + theirs) == ten
    other.close()


@pytest.mark.parametrize("value", ["20000", "20000-", "30000-20000", "80-90", "20000-70000", "a-b"])
def test_port_range_invalid(value: str) -> None:
    with pytest.raises(ValueError, match=r"HELMSMAN_PORT_RANGE is .*expected 'FIRST-LAST'"):
        port_range({RANGE_VARIABLE: value})


def test_port_range_from_environment() -> None:
    assert port_range({RANGE_VARIABLE: " 20000 - 20200 "}) == (20_000, 20_200)


def test_lease_port_bindable_by_owner(port: int) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", BIND_WITHOUT_LEASE, str(port)], check=True)
        with (
            socket.create_server(("0.0.0.0", port)),
            socket.create_connection(("127.0.0.1", port), timeout=10.0),
        ):
            pass


# --- the end of a lease ---------------------------------------------------------------------------

HOLDER = """
import os, sys
from helmsman._process.ports import PortLeases
leases = PortLeases()
print(*leases.lease(10), flush=True)
if sys.argv[1] == "forks" and os.fork() == 0:
    print("forked", flush=True)
input()
"""


@LINUX
@pytest.mark.parametrize("fork", ["alone", "forks"])
def test_lease_ends_with_its_process(leases: PortLeases, ten: list[int], fork: str) -> None:
    command = [sys.executable, "-c", HOLDER, fork]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert sorted(map(int, holder.stdout.readline().split())) == ten
        if fork == "forks":
            assert holder.stdout.readline() == "forked\n"
        with pytest.raises(OSError, match=r"only 0 of 1 .* leased 10, .* bound 0 "):
            leases.lease(1)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert sorted(leases.lease(10)) == ten
