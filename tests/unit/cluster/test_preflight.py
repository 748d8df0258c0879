"""Tests of the checks of a node before its Ray starts."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import cloudpickle
import msgspec
import pytest

from helmsman._cluster.preflight import node_address, require_port, versions
from helmsman._process.launchers import NodeIdentity
from helmsman._process.observation import address_towards
from helmsman.api.errors import PreflightError

ROOT = Path(__file__).parents[3]
ALONE = NodeIdentity(launcher="flags", rank=0, count=1)
HEAD = NodeIdentity(launcher="flags", rank=0, count=3)
PORT_NAME = ("of the head's Ray", "--port")

LISTENS = """
import socket, sys
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""

AS_OTHER_USER = """
# Python imports encodings.idna late, and another user may not read it
import encodings.idna, os, sys
from helmsman._cluster.up import require_port
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    require_port(int(sys.argv[1]), "of the head", "--port", listens=True)
except ValueError as error:
    print(error)
"""
WITHOUT_RAY = """
from helmsman._cluster.up import versions
try:
    versions()
except ValueError as error:
    print(error)
"""


@pytest.fixture
def holder() -> Iterator[tuple[int, int]]:
    """Start a program that listens; return its port and its pid."""
    command = [sys.executable, "-I", "-S", "-c", LISTENS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.kill()


# --- ports ----------------------------------------------------------------------------------------


def test_require_port_that_is_free() -> None:
    """A port in TIME_WAIT is free, since Ray sets SO_REUSEADDR."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        port = listener.getsockname()[1]
        listener.accept()[0].close()
        peer.recv(1)
    for _ in range(2):  # a check leaves the port free
        require_port(port, *PORT_NAME, listens=True)


@pytest.mark.parametrize("port", [-1, 0, 65_536, 1 << 70])
def test_require_port_out_of_range(port: int) -> None:
    with pytest.raises(
        PreflightError,
        match=f"port {port}, of the head's Ray, is invalid: expected 1 to 65535.*with --port",
    ):
        require_port(port, *PORT_NAME, listens=False)


def test_require_port_names_its_holder(holder: tuple[int, int]) -> None:
    port, pid = holder
    with pytest.raises(PreflightError) as caught:
        require_port(port, *PORT_NAME, listens=True)
    for fact in (
        f"port {port}, of the head's Ray, is held by process {pid} ({sys.executable} -I -S -c",
        "with --port, the same on all nodes",
    ):
        assert fact in str(caught.value)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_require_port_held_by_another_user(holder: tuple[int, int]) -> None:
    """The error shows no pid, which the user may not see."""
    port, pid = holder
    output = subprocess.run(
        [sys.executable, "-c", AS_OTHER_USER, str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "held by a process of another user or container" in output
    assert str(pid) not in output


# --- address --------------------------------------------------------------------------------------


def rank_one(head: str) -> NodeIdentity:
    return NodeIdentity(launcher="flags", rank=1, count=2, head=head)


def here() -> str:
    """Return the address of this machine on the network, or skip the test."""
    address = address_towards("")
    if not address or address.startswith("127."):
        pytest.skip("this machine has no network")
    return address


def test_node_address_of_one_node() -> None:
    assert node_address(ALONE, "lo") == ("127.0.0.1", "lo")
    address, interface = node_address(ALONE, "")
    assert address == (address_towards("") or "127.0.0.1")
    assert interface in {name for _, name in socket.if_nameindex()}


def test_node_address_by_route_and_interface() -> None:
    address, interface = node_address(HEAD, "")
    assert address == here()
    assert node_address(HEAD, interface) == (address, interface)
    assert node_address(rank_one(address), "") == (address, interface)
    assert node_address(rank_one("head.invalid"), "")[0] == here(), (
        "a name in Kubernetes may appear later, with its pod"
    )


@pytest.mark.parametrize(
    ("identity", "interface", "facts"),
    [
        (
            HEAD,
            "ib7",
            (
                "--interface 'ib7' is not an interface of this node with an IPv4 address; it has ",
                "lo 127.0.0.1",
            ),
        ),
        (
            HEAD,
            "lo",
            (
                "be 127.0.0.1, which no other host can reach; it",
                "lo 127.0.0.1",
                "--interface",
                "--head",
            ),
        ),
        (
            rank_one("localhost"),
            "",
            ("the head's name 'localhost' means this very host here", "--head"),
        ),
    ],
)
def test_node_address_unreachable_by_others(
    identity: NodeIdentity, interface: str, facts: tuple[str, ...]
) -> None:
    with pytest.raises(PreflightError) as caught:
        node_address(identity, interface)
    for fact in facts:
        assert fact in str(caught.value)


# --- versions -------------------------------------------------------------------------------------


def test_versions_without_ray(tmp_path: Path) -> None:
    for package in (msgspec, cloudpickle):
        (tmp_path / package.__name__).symlink_to(Path(package.__file__).parent)  # type: ignore[arg-type]
    output = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_RAY],  # -S hides the installed packages
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output == "Ray is not installed on this node: pip install 'helmsman-rl[ray]'\n"


def test_versions() -> None:
    assert versions() == {
        "python": platform.python_version(),
        "ray": version("ray"),
        "helmsman": version("helmsman-rl"),
    }
