"""Ports that one test has to itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

# Above the ephemeral ports of Linux, where nothing leases or binds any unasked.
_FIRST, _LAST, _BLOCK = 61_000, 65_500, 256


@contextlib.contextmanager
def own_ports() -> Iterator[range]:
    """A range of 255 free ports that no other test uses, in whatever process it runs: each test
    holds the port before its range.
    """
    for first in range(_FIRST, _LAST - _BLOCK, _BLOCK):
        ports = range(first + 1, first + _BLOCK)
        with socket.socket() as mark:
            try:
                mark.bind(("127.0.0.1", first))
                for port in ports:
                    with socket.socket() as tried:
                        tried.bind(("0.0.0.0", port))
            except OSError:
                continue
            yield ports
            return
    raise OSError(f"no {_BLOCK} ports in a row of {_FIRST}-{_LAST} are free")
