"""Ports that only one test uses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

# Above the ephemeral ports of Linux, which the system may assign at any time.
_FIRST, _LAST, _BLOCK = 61_000, 65_500, 256


@contextlib.contextmanager
def own_ports() -> Iterator[range]:
    """Reserve 255 free ports for one test. The port before them is bound, so that tests in other
    processes choose another range.
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
