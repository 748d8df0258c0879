"""What is told of a node before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import msgspec
import pytest

from helmsman.api.errors import PreflightError
from helmsman.controller._bootstrap.preflight import node_address, require_port
from helmsman.controller._node.launchers import NodeIdentity
from helmsman.controller._node.observation import address_towards
from tests.contract.helpers import ROOT

ALONE = NodeIdentity(launcher="flags", rank=0, count=1)
HEAD = NodeIdentity(launcher="flags", rank=0, count=3)
WHAT = ("of the head's Ray", "--port")

LISTENS = """
import socket, sys
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
"""
WAITS = LISTENS + "listener.accept()[0].recv(1)\nsys.stdin.read()"
ANSWERS = LISTENS + "listener.accept()[0].sendall({})\nsys.stdin.read()"

AS_OTHER_USER = """
# Python finds encodings.idna late, where another user may not look
import encodings.idna, os, sys
from helmsman.controller._bootstrap.up import require_port
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    require_port(int(sys.argv[1]), "of the head", "--port", listens=True)
except ValueError as error:
    print(error)
"""
WITHOUT_RAY = """
from helmsman.controller._bootstrap.up import versions
try:
    versions()
except ValueError as error:
    print(error)
"""

Listen = Callable[..., tuple[int, int]]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Start a program that listens; returns its port and its pid."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *arguments: str, program: str = sys.executable) -> tuple[int, int]:
        command = [program, "-I", "-S", "-c", source, *arguments]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return int(started[-1].stdout.readline()), started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


# --- ports ----------------------------------------------------------------------------------------


def test_require_port_that_is_free() -> None:
    """Also one that the kernel keeps after a connection for a minute from those who do not ask to
    reuse it, as Ray does.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        port = listener.getsockname()[1]
        listener.accept()[0].close()
        peer.recv(1)
    for _ in range(2):  # the first has not taken it
        require_port(port, *WHAT, listens=True)


@pytest.mark.parametrize("port", [-1, 0, 65_536, 1 << 70])
def test_require_port_out_of_range(port: int) -> None:
    with pytest.raises(
        PreflightError,
        match=f"port {port}, of the head's Ray, is invalid: expected 1 to 65535.*with --port",
    ):
        require_port(port, *WHAT, listens=False)


@pytest.mark.parametrize(
    "who", ["a foreign program", "another run of helmsman up", "another Ray cluster"]
)
def test_require_port_names_its_holder(listen: Listen, tmp_path: Path, who: str) -> None:
    """A Ray cluster is known by the program of its head, of which the process table has the
    name.
    """
    gcs = tmp_path / "gcs_server"
    gcs.symlink_to(sys.executable)
    arguments = ("helmsman", "up", "--port", "6379") if "helmsman" in who else ()
    port, pid = listen(
        f"'{who}'\n{WAITS}", *arguments, program=str(gcs) if "Ray" in who else sys.executable
    )
    with pytest.raises(PreflightError) as caught:
        require_port(port, *WHAT, listens=True)
    for fact in (
        f"port {port}, of the head's Ray",
        f"held by {who} (pid {pid}: ",
        "with --port, the same on all nodes",
    ):
        assert fact in str(caught.value)


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0, reason="acts as another user, who may not see whose port it is"
)
@pytest.mark.parametrize(
    ("source", "who"),
    [
        (
            ANSWERS.format(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])),
            (
                "a program that speaks gRPC, most likely the head of another Ray cluster, of "
                "another user or container"
            ),
        ),
        (
            ANSWERS.format(b"HTTP/1.1 400 Bad Request"),
            "held by a program, of another user or container",
        ),
        (WAITS, "held by a program, of another user or container"),
    ],
    ids=["HTTP/2", "HTTP/1", "says nothing"],
)
def test_require_port_held_by_another_user(listen: Listen, source: str, who: str) -> None:
    port, pid = listen(source)
    told = subprocess.run(
        [sys.executable, "-c", AS_OTHER_USER, str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert who in told
    assert str(pid) not in told


# --- the address ----------------------------------------------------------------------------------


def rank_one(head: str) -> NodeIdentity:
    return NodeIdentity(launcher="flags", rank=1, count=2, head=head)


def here() -> str:
    """The address of this machine that others reach."""
    address = address_towards("")
    if not address or address.startswith("127."):
        pytest.skip("this machine has no route to anywhere")
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
        "a name may come with its pod, as in Kubernetes"
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
def test_node_address_that_others_cannot_reach(
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
    told = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_RAY],  # which leaves the installed packages out
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told == "Ray is not installed on this node: pip install 'helmsman[ray]'\n"


def test_versions() -> None:
    assert versions() == {
        "python": platform.python_version(),
        "ray": version("ray"),
        "helmsman": version("helmsman"),
    }
