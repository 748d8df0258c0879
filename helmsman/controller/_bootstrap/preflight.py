"""Checks before a node starts: versions, its address for the other nodes, and free ports."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import socket

from helmsman.api.errors import PreflightError
from helmsman.api.interfaces import ipv4_interfaces
from helmsman.api.version import __version__
from helmsman.controller._node.launchers import NodeIdentity
from helmsman.controller._node.observation import (
    address_towards,
    bind_error,
)

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_ANSWER_S = 1.0
_SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"


def versions() -> dict[str, str]:
    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise PreflightError(
            "Ray is not installed on this node: pip install 'helmsman-rl[ray]'"
        ) from error
    return {"python": platform.python_version(), "ray": ray, "helmsman": __version__}


def node_address(identity: NodeIdentity, interface: str) -> tuple[str, str]:
    """Return this node's IPv4 address for other nodes, and its interface ('' if unknown).

    Uses ``interface`` if given, else the route to the head. The head uses the address of its own
    name as the other nodes know it.

    Raises:
        PreflightError: There is no such address, or only this host could use it.
    """
    interfaces = ipv4_interfaces()
    described = (
        ", ".join(f"{name} {address or 'without address'}" for name, address in interfaces.items())
        or "none"
    )
    if interface:
        address = interfaces.get(interface, "")
        if not address:
            raise PreflightError(
                f"--interface {interface!r} is not an interface of this node with an IPv4 address; "
                f"it has {described}"
            )
    elif identity.count == 1:
        address = address_towards("")
        address = address if address and ":" not in address else "127.0.0.1"
    else:
        address = address_towards(identity.head)
        if identity.rank == 0 and address.startswith("127."):
            # Many hosts map their own name to loopback.
            address = address_towards("")
    if identity.count > 1 and (problem := _why_unreachable(address, identity)):
        raise PreflightError(
            f"{problem}; it has {described}. Name an interface with an IPv4 address that leads to "
            "the other nodes with "
            "--interface, or the head's address with --head"
        )
    return address, interface or next(
        (name for name, own in interfaces.items() if own == address), ""
    )


def _why_unreachable(address: str, identity: NodeIdentity) -> str:
    if not address:
        whom = f"to the head {identity.head}" if identity.rank else "to anywhere"
        return (
            f"this node has no route {whom}, and the {identity.count - 1} other nodes must reach it"
        )
    if ":" in address:
        return f"this node's address would be {address}, and nodes meet by IPv4 alone"
    if address.startswith("127."):
        why = (
            f" (the head's name {identity.head!r} means this very host here)"
            if identity.rank
            else ""
        )
        return f"this node's address would be {address}, which no other host can reach{why}"
    return ""


def require_port(port: int, what: str, flag: str, *, listens: bool) -> None:
    """Raise PreflightError if a port is invalid, or taken where this node must listen on it."""
    if not 0 < port < 1 << 16:
        raise PreflightError(
            f"port {port}, {what}, is invalid: expected 1 to 65535. Choose another with {flag}"
        )
    reason = bind_error(port) if listens else 0
    if reason == errno.EADDRINUSE:
        raise PreflightError(
            f"port {port}, {what}, is held by {_holder(port)}. End that process, or choose another "
            f"port with {flag}, the same on all nodes"
        )
    if reason:
        raise PreflightError(
            f"port {port}, {what}, cannot be bound: {os.strerror(reason)}; set another with {flag}"
        )


def _holder(port: int) -> str:
    inode = _inode_of_listener(port)
    found = _owner_of(inode) if inode else None
    if found is None:
        kind = (
            "a program that speaks gRPC, most likely the head of another Ray cluster"
            if _speaks_grpc(port)
            else "a program"
        )
        return f"{kind}, of another user or container"
    pid, command = found
    program = os.path.basename(command.partition(" ")[0])
    kind = "another Ray cluster" if program == "gcs_server" else "a foreign program"
    if "helmsman" in command and " up " in f"{command} ":
        kind = "another run of helmsman up"
    return f"{kind} (pid {pid}: {command[:120]})"


def _inode_of_listener(port: int) -> str:
    for path in _SOCKETS:
        with contextlib.suppress(OSError), open(path) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    return fields[9]
    return ""


def _owner_of(inode: str) -> tuple[int, str] | None:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{fd}") == f"socket:[{inode}]":
                    with open(f"/proc/{entry}/cmdline", "rb") as file:
                        return int(entry), file.read().replace(b"\0", b" ").decode(
                            errors="replace"
                        ).strip()
    return None


def _speaks_grpc(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), _ANSWER_S) as peer:
            peer.settimeout(_ANSWER_S)
            peer.sendall(_HTTP2_PREFACE)
            answer = peer.recv(9)
    except OSError:
        return False
    return len(answer) == 9 and answer[3] == 4  # a SETTINGS frame, the first frame of HTTP/2
