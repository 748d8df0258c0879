"""Checks before a node starts: versions, its address for the other nodes, and free ports."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform

from helmsman._base.interfaces import ipv4_interfaces
from helmsman._process.guardian import proc_text
from helmsman._process.launchers import NodeIdentity
from helmsman._process.observation import address_towards, bind_error, version_of
from helmsman.api.environment import masked_command
from helmsman.api.errors import PreflightError
from helmsman.api.version import __version__

_SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"


def versions() -> dict[str, str]:
    ray = version_of("ray")
    if not ray:
        raise PreflightError("Ray is not installed on this node: pip install 'helmsman-rl[ray]'")
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
    """Name the process that listens on a port, as far as this user may see it."""
    rows = [line.split() for table in _SOCKETS for line in proc_text(table).splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
    }
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) in sockets:
                pid = path.split("/")[2]
                command = masked_command(proc_text(f"/proc/{pid}/cmdline").split("\0"))
                return f"process {pid} ({command.strip()[:120]})"
    return "a process of another user or container"
