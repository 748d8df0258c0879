"""Whether one worker can be reached by others at an address and port, tried before a process group
relies on it.

The listener sends a proof, so that another program at its address is not mistaken for it.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import threading

_CLOSE_S = 0.5
_MAX_OPEN = 256
"""Connections that stay open until the peer closes them; beyond this number the oldest is
closed.
"""


class Listener:
    """Listens on one port at a time, as the store of a process group will: on all addresses,
    reusing them.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def listen(self, port: int | None, proof: bytes = b"", limit_s: float = 0.0) -> str:
        """Answer connections to ``port`` with ``proof``; None ends it. Returns why it cannot
        listen, '' when it does.
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
        except RuntimeError as error:  # the limit on threads
            listener.close()
            return str(error)
        self._listener, self._thread = listener, thread
        return ""

    def close(self) -> None:
        listener, thread, self._listener, self._thread = self._listener, self._thread, None, None
        if listener is not None and thread is not None:
            with contextlib.suppress(OSError):
                # wakes the thread that accepts, where closing alone would not
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(_CLOSE_S)  # until it has gone the kernel counts the port as listened on


def _bound(port: int) -> socket.socket:
    try:
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    except (OSError, ValueError):  # a host without IPv6; or the port is taken, which this then says
        return socket.create_server(("", port), backlog=4096)


def _answer(listener: socket.socket, proof: bytes) -> None:
    # A peer closes first, so that its connection does not linger on this port. Nothing waits for
    # it: a silent one would delay the others.
    answered: collections.deque[socket.socket] = collections.deque()
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            break  # closed, or its time is over
        with contextlib.suppress(OSError):
            peer.setblocking(False)
            peer.send(proof)  # it fits into the buffer of a new connection
        answered.append(peer)
        if len(answered) > _MAX_OPEN:
            answered.popleft().close()
    listener.close()
    for peer in answered:
        peer.close()


def reach(address: str, port: int, proof: bytes, limit_s: float) -> str:
    """Connect to a Listener within ``limit_s`` seconds; returns why it cannot be reached, '' when
    it was.
    """
    try:
        with socket.create_connection((address, port), timeout=limit_s) as peer:
            # Closed by a reset, so that thousands of connections leave nothing behind on either
            # side.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            received = b""
            while len(received) < len(proof) and (part := peer.recv(len(proof) - len(received))):
                received += part
    except TimeoutError:
        return f"no answer within {limit_s:.1f} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == proof else "something else answers there"
