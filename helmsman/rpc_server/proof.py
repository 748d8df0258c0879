"""Connecting, and the mutual proof that comes before anything else.

The proof is that of ``multiprocessing.connection``: an HMAC challenge in both directions. Nothing from a peer is unpickled, nor
even decoded, before it has proved that it knows the run's key.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from helmsman.api.errors import ProtocolError

PROOF_LIMIT_S = 5.0
"""Seconds that a peer has to prove itself."""

_FULL_PAUSE_S = 0.01


def prove_as_server(connection: Connection, key: bytes) -> None:
    """Challenge the peer, then answer its challenge. Raises AuthenticationError, EOFError or OSError."""
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


_MAX_SOCKET_PATH_BYTES = 103
"""What fits into a socket address everywhere (104 bytes with its end on macOS, 108 on Linux)."""


@contextlib.contextmanager
def fitting_path(path: str) -> Iterator[str]:
    """A path to the same socket that fits into an address, for the time of a bind or connect: a TMPDIR may be long."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def connect(path: str, key: bytes, limit_s: float) -> socket.socket:
    """Connect to a worker's Unix socket and prove ourselves; blocking, at most ``limit_s`` seconds.

    Raises: OSError (nobody listens), ProtocolError (it is not a worker of this run).
    """
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with raw, fitting_path(path) as address:
        raw.settimeout(limit_s)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                raw.connect(address)
            except BlockingIOError:  # others wait there to be accepted, and a Unix socket with a limit does not wait with them
                if time.monotonic() > deadline:
                    raise
                time.sleep(_FULL_PAUSE_S)
            else:
                return _prove(raw, key, limit_s, path)


def connect_tcp(address: tuple[str, int], key: bytes, limit_s: float) -> socket.socket:
    """As connect, to a worker's TCP socket."""
    with socket.create_connection(address, limit_s) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _prove(raw, key, limit_s, f"{address[0]}:{address[1]}")


def _prove(raw: socket.socket, key: bytes, limit_s: float, where: str) -> socket.socket:
    """The same connection, once both ends have proved themselves; ``raw`` is used up."""
    with raw:
        raw.settimeout(None)
        # Connection reads without a deadline; the kernel's receive time-out bounds a peer that stays silent.
        _set_timeouts(raw, limit_s)
        connection = Connection(raw.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        proved = socket.socket(fileno=socket.dup(connection.fileno()))
    except (EOFError, OSError, ValueError, AssertionError) as error:
        raise ProtocolError(f"the process at the other end of {where} did not prove that it belongs to this run") from error
    except Exception as error:
        from multiprocessing import AuthenticationError

        if not isinstance(error, AuthenticationError):
            raise
        raise ProtocolError(f"the process at the other end of {where} has another key than this run") from error
    finally:
        connection.close()
    _set_timeouts(proved, 0)
    return proved


def _set_timeouts(sock: socket.socket, seconds: float) -> None:
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
