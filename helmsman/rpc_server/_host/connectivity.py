"""Tests whether other workers can connect to a worker, before a process group relies on it.

The listener sends a proof, which distinguishes it from another program at its address.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import threading

_CLOSE_S = 0.5
_MAX_OPEN = 256
"""Connections kept open until the peer closes them; beyond this number the oldest is closed."""


class PortListener:
    """Listens on one port at a time, on all addresses, like the store of a process group."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def listen(self, port: int | None, proof: bytes = b"", limit_s: float = 0.0) -> str:
        """Answer connections to a port with a proof.

        Args:
            port: The port; None stops listening.
            proof: Bytes sent to each peer.
            limit_s: Seconds without a connection after which it stops listening.

        Returns:
            The reason why it cannot listen; '' on success.
        """
        self.close()
        if port is None:
            return ""
        try:
            listener = _bound(port)
        except OSError as error:
            return error.strerror or str(error)
        listener.settimeout(limit_s)
        thread = threading.Thread(
            target=_answer, args=(listener, proof), name="listen", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # limit on threads
            listener.close()
            return str(error)
        self._listener, self._thread = listener, thread
        return ""

    def close(self) -> None:
        listener, thread, self._listener, self._thread = self._listener, self._thread, None, None
        if listener is not None and thread is not None:
            with contextlib.suppress(OSError):
                # Wakes the accepting thread; closing alone would not.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(_CLOSE_S)  # the kernel frees the port only after accept() has returned


def _bound(port: int) -> socket.socket:
    try:
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    except (OSError, ValueError):  # no IPv6, or the port is taken: then this raises OSError, too
        return socket.create_server(("", port), backlog=4096)


def _answer(listener: socket.socket, proof: bytes) -> None:
    # The peer closes first, so that its connection does not linger on this port. The loop does not
    # wait for that: a silent peer would delay the others.
    answered: collections.deque[socket.socket] = collections.deque()
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            break  # closed, or the time limit is over
        with contextlib.suppress(OSError):
            peer.setblocking(False)
            peer.send(proof)  # fits into the buffer of a new connection
        answered.append(peer)
        if len(answered) > _MAX_OPEN:
            answered.popleft().close()
    listener.close()
    for peer in answered:
        peer.close()


def reach(address: str, port: int, proof: bytes, limit_s: float) -> str:
    """Connect to a Listener and check its proof.

    Args:
        address: Address of the listener.
        port: Port of the listener.
        proof: Bytes that the listener must send.
        limit_s: Time limit of each step in seconds.

    Returns:
        The reason why it cannot be reached; '' on success.
    """
    try:
        with socket.create_connection((address, port), timeout=limit_s) as peer:
            # Close by a reset, so that thousands of connections leave no TIME_WAIT state on either
            # side.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            received = b""
            while len(received) < len(proof) and (part := peer.recv(len(proof) - len(received))):
                received += part
    except TimeoutError:
        return f"no answer within {limit_s:.1f} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == proof else "another program answers there"
