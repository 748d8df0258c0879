"""Processes behind bare Unix sockets that answer messages at once, as the floor of a call.

python -m benchmarks.bare DESCRIPTOR...
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_LENGTH = struct.Struct("!i")
EMPTY, _REPLY = bytes(64), bytes(32)
"""Messages of the size of an empty call's."""
_MOST_BYTES = 1 << 22


class BarePeers:
    """A process behind each of several sockets, as a context manager."""

    def __init__(self, num_peers: int) -> None:
        self._num_peers = num_peers

    def __enter__(self) -> Self:
        pairs = [socket.socketpair() for _ in range(self._num_peers)]
        theirs = [end.fileno() for _, end in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare", *map(str, theirs)],
            pass_fds=theirs,
            cwd=Path(__file__).parent.parent,
        )
        for _, end in pairs:
            end.close()
        self._sockets = [end for end, _ in pairs]
        self.round_trips()  # all answer
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
        self._process.wait()

    def round_trips(self, data: bytes = EMPTY) -> None:
        """Send bytes to all peers, and receive the answer of each.

        Args:
            data: The bytes.
        """
        for each in self._sockets:
            if len(data) > len(EMPTY):  # without a copy
                each.sendall(_LENGTH.pack(len(data)))
                each.sendall(data)
            else:
                each.sendall(_LENGTH.pack(len(data)) + data)
        for each in self._sockets:
            each.recv(len(_REPLY))


def serve(peer: socket.socket) -> None:
    """Answer messages until the connection ends."""
    buffer = memoryview(bytearray(_MOST_BYTES))
    received = 0
    while num_bytes := peer.recv_into(buffer[received:]):
        received += num_bytes
        if received >= _LENGTH.size and received == _LENGTH.size + _LENGTH.unpack_from(buffer)[0]:
            peer.sendall(_REPLY)
            received = 0


def main(descriptors: Sequence[int]) -> None:
    """Serve each socket in a process of its own."""
    peers = [socket.socket(fileno=each) for each in descriptors]
    for peer in peers:
        if os.fork() == 0:
            for other in peers:
                if other is not peer:
                    other.close()
            serve(peer)
            os._exit(0)
    for peer in peers:
        peer.close()
    for _ in peers:
        os.wait()


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
