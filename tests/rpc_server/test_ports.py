"""Leases of ports: nobody gets one twice, and they end with their holder."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from helmsman.rpc_server.ports import FIRST_PORT, PortLeases


def test_leases_are_apart_and_free_to_bind() -> None:
    one, two = PortLeases(), PortLeases()
    ports = one.lease(50) + two.lease(50)
    assert len(set(ports)) == 100
    assert min(ports) >= FIRST_PORT
    for port in ports[:5]:
        with socket.socket() as bound:
            bound.bind(("0.0.0.0", port))
    one.close()
    two.close()
    one.close()


def test_a_port_that_somebody_listens_on_is_not_leased() -> None:
    leases = PortLeases()
    (port,) = leases.lease(1)
    leases.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        everything = PortLeases()
        with pytest.raises(OSError, match="ports are free between"):
            everything.lease(100_000)
        assert not everything._held, "all or nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="leases are sockets of Linux's abstract namespace")
def test_a_lease_of_another_process_holds_until_it_ends() -> None:
    script = "from helmsman.rpc_server.ports import _lock; l = _lock(20001); print(l is not None, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        from helmsman.rpc_server.ports import _lock

        assert _lock(20001) is None
        holder.kill()
        holder.wait()
        lock = _lock(20001)
        assert lock is not None
        lock.close()
