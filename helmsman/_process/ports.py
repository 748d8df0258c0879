"""Leases of ports, held by the process that will bind them.

A lease is a Unix socket in the kernel's abstract namespace, named after the port. Every process of
the network namespace sees it, and it ends with its process. A port that another program has bound
is skipped. Leased ports lie below the ephemeral range, from which the system serves programs that
request any free port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import sys
from collections.abc import Mapping

RANGE_VARIABLE = "HELMSMAN_PORT_RANGE"
"""Environment variable: first and last port that may be leased, such as '20000-20200'."""
PORTS_VARIABLE = "HELMSMAN_PORTS"
"""Environment variable of a child that runs a spec's command: its leased ports, 'port,port'."""
FIRST_PORT = 20_000
_EPHEMERAL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_TAKEN = (errno.EADDRINUSE, errno.EACCES)
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL)

_locks: set[socket.socket] = set()


class PortLeases:
    """The ports that this process has leased."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    @property
    def leased(self) -> tuple[int, ...]:
        """The leased ports, in the order of their leases."""
        return tuple(self._held)

    def lease(self, count: int) -> list[int]:
        """Lease more ports, below the ephemeral range or in HELMSMAN_PORT_RANGE.

        Args:
            count: Number of ports.

        Returns:
            The new ports, which are neither leased nor bound by any other process.

        Raises:
            OSError: Fewer than ``count`` ports are free; none is leased then.
            ValueError: HELMSMAN_PORT_RANGE is not a valid range.
        """
        first, last = port_range(os.environ)
        candidates = list(range(first, last + 1))
        if count > len(candidates):
            raise OSError(
                f"{count} ports cannot be leased: the range {first}-{last} has "
                f"{len(candidates)}; request fewer, or set {RANGE_VARIABLE} to a wider range"
            )
        random.SystemRandom().shuffle(candidates)
        with contextlib.ExitStack() as undo:
            leased: list[int] = []
            num_ours = num_foreign = 0
            for port in candidates:
                if len(leased) == count:
                    break
                lock = None if port in self._held else _lock(port)
                if lock is None:
                    num_ours += 1
                    continue
                self._held[port] = lock
                undo.callback(self._release, port)
                if _is_free(port):
                    leased.append(port)
                else:
                    num_foreign += 1
                    self._release(port)
            if len(leased) < count:
                raise OSError(
                    f"only {len(leased)} of {count} ports are free: of the {len(candidates)} "
                    f"ports {first}-{last} of this node, Helmsman's workers leased {num_ours}, "
                    f"other programs have bound {num_foreign} (or had a minute ago); end "
                    f"programs that are no longer needed, or set {RANGE_VARIABLE} to a wider range"
                )
            undo.pop_all()
        return leased

    def _release(self, port: int) -> None:
        lock = self._held.pop(port, None)
        if lock is not None:
            _locks.discard(lock)
            lock.close()

    def close(self) -> None:
        """Release all ports. Idempotent."""
        for port in list(self._held):
            self._release(port)


def port_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the first and the last port that may be leased on this node.

    Raises:
        ValueError: HELMSMAN_PORT_RANGE is not a valid range.
    """
    value = environ.get(RANGE_VARIABLE, "").strip()
    if not value:
        return FIRST_PORT, _first_ephemeral_port() - 1
    match = re.fullmatch(r"(\d{1,5})\s*-\s*(\d{1,5})", value)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65_535:
        raise ValueError(
            f"{RANGE_VARIABLE} is {value!r}; expected 'FIRST-LAST' with 1024 <= FIRST <= LAST <= "
            "65535, such as 20000-20200, "
            "or leave it unset for the ports from 20000 to the ephemeral range"
        )
    return int(match[1]), int(match[2])


def _first_ephemeral_port() -> int:
    try:
        with open(_EPHEMERAL_RANGE) as file:
            return max(FIRST_PORT + 1000, int(file.read().split()[0]))
    except OSError:
        return 32_768


def _lock(port: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            # Other systems have no abstract namespace, and only check whether the port is bound.
            lock.bind(f"\0helmsman/port/{port}")
    except OSError:
        lock.close()
        return None
    _locks.add(lock)
    return lock


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address, port))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if family == socket.AF_INET or error.errno not in _NO_IPV6:
                raise
    return True


def _forget_in_child() -> None:
    """Close inherited locks, which would keep a port leased after its worker has ended."""
    for lock in _locks:
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
