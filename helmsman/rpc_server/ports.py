"""Ports leased by the process that will bind them.

A lease is a Unix socket in the kernel's abstract namespace, named after the port. It is seen by every process that shares
the port space (both belong to the network namespace), costs no file, and ends with its process, however that dies. A leased
port is not bound, so the engine can bind it without a hand-over.
"""

from __future__ import annotations

import random
import socket
import sys

FIRST_PORT = 20_000
_EPHEMERAL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class PortLeases:
    """The ports that this process holds."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket | None] = {}

    def lease(self, count: int) -> list[int]:
        """Lease ``count`` more ports below the ephemeral range that nobody holds or listens on.

        Raises: OSError when there are not that many.
        """
        last = _first_ephemeral_port()
        candidates = list(range(FIRST_PORT, last))
        random.SystemRandom().shuffle(candidates)
        leased: list[int] = []
        for port in candidates:
            if len(leased) == count:
                break
            if port in self._held or not _is_free(port):
                continue
            lock = _lock(port)
            if lock is None:
                continue
            self._held[port] = lock
            leased.append(port)
        if len(leased) < count:
            for port in leased:
                self._release(port)
            raise OSError(f"only {len(leased)} of {count} ports are free between {FIRST_PORT} and {last - 1} on this node")
        return leased

    def _release(self, port: int) -> None:
        lock = self._held.pop(port)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        """Give all leases back."""
        for port in list(self._held):
            self._release(port)


def _lock(port: int) -> socket.socket | None:
    if sys.platform != "linux":
        # No abstract namespace elsewhere: the random choice and the bind probe are all there is.
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0helmsman/port/{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in _TAKEN:
                continue  # a host without IPv6
            return False
    return True


_TAKEN = (98, 48, 13)  # EADDRINUSE on Linux and macOS, EACCES


def _first_ephemeral_port() -> int:
    try:
        with open(_EPHEMERAL_RANGE) as file:
            return max(FIRST_PORT + 1000, int(file.read().split()[0]))
    except OSError:
        return 32_768
